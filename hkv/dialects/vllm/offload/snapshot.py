"""Chunks of the second tier at one moment, of a log's `state`, beside the GPU's blocks where a scheduler has some.

A chunk without a transfer is cached: it may leave. A transfer holds those that it reads or writes, and those that have
lost their key meanwhile and are in no list. Of the GPU's pool a state tells the free queue and the requests' rows.
"""

from __future__ import annotations

import collections

from hkv.contract.snapshot import Block, Entry, Holder, PoolSnapshot, Snapshot
from hkv.dialects.vllm.offload import log as structs
from hkv.dialects.vllm.offload.config import SIMPLE


def snapshot(header: structs.Header, state: structs.State) -> Snapshot:
    """Blocks of the GPU's pool, if the state is a scheduler's, and chunks of the tier."""
    tier, at = state.pool, len(header.num_blocks) - 1
    first = int(header.connector == SIMPLE)  # its chunk 0 stands for none
    holders: dict[Block, list[Holder]] = collections.defaultdict(list)
    references: dict[Block, int] = {}
    entries: dict[Block, Entry] = {}
    queue = [*reversed(tier.free), *range(max(first, tier.handed_out), header.num_blocks[-1])]
    free, known = set(queue), set(tier.free)
    for chunk in tier.chunks:
        known.add(chunk.id)
        name, group = chunk.key
        entries[at, chunk.id] = (group, -1, name)
        references[at, chunk.id] = abs(chunk.readers) if chunk.id not in free else 0
    references |= {(at, id): 1 for id in range(first, tier.handed_out) if id not in known}
    pools = [PoolSnapshot("chunks", range(first, header.num_blocks[-1]), queue)]
    if state.scheduler is not None:
        for id, request in state.scheduler.requests.items():
            for group, row in enumerate(request.rows):
                for column, block in enumerate(row):
                    if block > 0:
                        holders[0, block].append((id, group, column))
        ids = range(1, header.num_blocks[0])
        taken = set(ids).difference(state.scheduler.free, (block for pool, block in holders if pool == 0))
        references |= {(0, id): 1 for id in taken}  # of a transfer, or of a row that the state does not tell
        pools.insert(0, PoolSnapshot("blocks", ids, state.scheduler.free))
    return Snapshot(tuple(pools), holders, references, entries)

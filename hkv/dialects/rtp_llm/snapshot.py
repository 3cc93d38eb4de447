"""Blocks of RTP-LLM's pools at one moment, of a log's `state` (`hkv.contract.snapshot`).

One pool, or one a group; block 0 is reserved. A cached block is in no free list: the cache itself holds a reference for
each item, which is not counted. An export holds items that have left the cache by references of that role. A state
names keys, not the lengths they stand for: those follow from the column of a request that holds the block, if one does.
"""

from __future__ import annotations

import collections

from hkv.contract.snapshot import Block, Entry, Holder, PoolSnapshot, Snapshot
from hkv.dialects.rtp_llm.config import HYBRID_POOL
from hkv.dialects.rtp_llm.log import RtpHeader, RtpState


def snapshot(header: RtpHeader, state: RtpState) -> Snapshot:
    """Blocks of all pools, as a state tells them."""
    apart = header.dialect == HYBRID_POOL
    holders: dict[Block, list[Holder]] = collections.defaultdict(list)
    for id, sequences in state.lists.items():
        for rows in sequences:
            for group, row in enumerate(rows):
                for column, block in enumerate(row):
                    if block > 0:
                        holders[group if apart else 0, block].append((id, group, column))
    references: collections.Counter[Block] = collections.Counter()
    for number, pool in enumerate(state.pools):
        for counts in (pool.request, pool.connector, pool.cache):
            for block, count in counts.items():
                references[number, int(block)] += count
    entries: dict[Block, Entry] = {}
    for key, blocks in state.cached:
        for group, block in enumerate(blocks):
            if block > 0:
                at = group if apart else 0, block
                entries[at] = (group, -1, f"{key & (1 << 64) - 1:016x}")
                references[at] -= 1
    names = [group.tag for group in header.groups] if apart else ["blocks"]
    pools = (
        PoolSnapshot(name, range(1, count), pool.free)
        for name, count, pool in zip(names, header.num_blocks, state.pools, strict=True)
    )
    return Snapshot(tuple(pools), holders, references, entries)

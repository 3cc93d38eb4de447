"""Blocks of vLLM's pool at one moment, of a log's `state` (`hkv.contract.snapshot`).

One pool serves all groups, and block 0 is the null block, which is never handed out. A cached block that nobody holds
stays in the free queue until it is handed out, so that it is free and cached at once. A block may have references that
no row explains: both ends of a copy that is not made yet, and blocks that a connector holds.
"""

from __future__ import annotations

import collections

from hkv.contract.snapshot import Block, Holder, PoolSnapshot, Snapshot
from hkv.dialects.vllm.log.structs import CacheState, Header


def snapshot(header: Header, state: CacheState) -> Snapshot:
    """Blocks of the pool, as a state tells them."""
    holders: dict[Block, list[Holder]] = collections.defaultdict(list)
    for id, rows in state.rows.items():
        for group, row in enumerate(rows):
            for column, block in enumerate(row):
                if block:
                    holders[0, block].append((id, group, column))
    pool = PoolSnapshot("blocks", range(1, header.num_blocks), state.free)
    references = {(0, int(block)): count for block, count in state.refs.items() if block != "0"}
    return Snapshot((pool,), holders, references, {(0, int(block)): entry for block, entry in state.cached.items()})

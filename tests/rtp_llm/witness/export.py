"""Blocks on their way out: what eviction hands to another tier, and what connectors hold while they copy."""

from __future__ import annotations

from collections.abc import Sequence

from hkv.dialects.rtp_llm.config import NULL, SINGLE
from tests.rtp_llm.witness.allocator import Allocator
from tests.rtp_llm.witness.eviction import select
from tests.rtp_llm.witness.pool import CACHE, CONNECTOR, REQUEST, BlockPool
from tests.rtp_llm.witness.resource import BatchResource, Resource


def pop_from_cache(allocator: Allocator, least: int) -> BatchResource | None:
    """Evict at least `least` blocks for a caller that copies them away (RTP-LLM `popBlocksFromCache`).

    The blocks keep their cache references until `free_cached` is called.

    Returns:
      One sequence with the evicted keys, in order, and each group's blocks or `NULL`; None when nothing was evicted.
    """
    evicted = select(allocator.cache, least)
    if not evicted:
        return None
    batch = BatchResource(allocator.config)
    row = batch.rows[0]
    row.set_keys([each.key for each in evicted])
    row.dependencies = [each.dependency for each in evicted]
    row.canonical = row.aligned = True
    for group, blocks in enumerate(row.groups):
        blocks.assign(each.blocks[group] for each in evicted)
    return batch


def free_cached(allocator: Allocator, resource: BatchResource) -> None:
    """Give back the cache references of blocks that were popped, one for each block however often it is listed."""
    seen: set[tuple[int, int]] = set()
    for row in resource.rows:
        for kind, blocks in zip(allocator.kinds, row.groups, strict=True):
            for block in blocks.real:
                name = (allocator.pools.index(kind.pool), block)
                if name not in seen:
                    seen.add(name)
                    kind.pool.release([block], CACHE)


class HeldBlocks:
    """A sequence whose blocks somebody holds for as long as it takes; `release` gives them back, once.

    Attributes:
      resource: the selected keys and blocks.
    """

    def __init__(self, resource: Resource, pools: Sequence[BlockPool], role: str) -> None:
        self.resource = resource
        self._pools = pools
        self._role = role
        self._held = [[block for block in blocks.blocks if block > 0] for blocks in resource.groups]
        for pool, blocks in zip(pools, self._held, strict=True):
            pool.reference(blocks, role)

    def release(self) -> None:
        """Give the references back; again changes nothing."""
        for pool, blocks in zip(self._pools, self._held, strict=True):
            pool.release(blocks, self._role)
        self._held = [[] for _ in self._pools]


def hold(allocator: Allocator, source: Resource, keys: Sequence[int], *, connector: bool) -> HeldBlocks | None:
    """Hold the blocks under some of a sequence's keys (RTP-LLM `incrKVCacheRef`).

    Args:
      allocator: the groups.
      source: the sequence.
      keys: keys to hold; unknown ones are skipped.
      connector: hold them for a connector, not for a request.

    Returns:
      A sequence of the found keys and their blocks, `NULL` where a group has none; None when no key has a block.
    """
    dummy_tail = connector and not source.aligned
    chosen: list[int] = []
    for key in keys:
        if key not in source.keys:
            continue
        position = source.keys.index(key)
        if any(block > 0 for block in _column(source, position)) or (
            dummy_tail and _is_tail(allocator, source, position, bool(chosen))
        ):
            chosen.append(position)
    held = Resource(allocator.config.topology, [source.keys[position] for position in chosen], aligned=source.aligned)
    held.canonical = source.canonical
    held.dependencies = [source.dependencies[position] for position in chosen]
    held.device_reuse, held.memory_reuse = source.device_reuse, source.memory_reuse
    held.remote_reuse = source.remote_reuse
    columns = [_column(source, position) for position in chosen]
    for group, blocks in enumerate(held.groups):
        blocks.assign(column[group] for column in columns)
    if not any(block > 0 for column in columns for block in column):
        return None
    pools = [kind.pool for kind in allocator.kinds]
    return HeldBlocks(held, pools, CONNECTOR if connector else REQUEST)


def _column(source: Resource, position: int) -> list[int]:
    """Each group's block at a position, `NULL` beyond its list."""
    return [blocks.blocks[position] if position < len(blocks) else NULL for blocks in source.groups]


def _is_tail(allocator: Allocator, source: Resource, position: int, begun: bool) -> bool:
    """True if a key without blocks is kept as the mark of a partly filled block."""
    if allocator.config.name == SINGLE:
        return position >= len(source.groups[0])
    return begun and position == len(source.keys) - 1

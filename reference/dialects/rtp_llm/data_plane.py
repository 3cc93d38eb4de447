"""Write, gather, scatter, copy and zero in RTP-LLM's pools, element by element: pools are arrays of bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hkv.layout.block_layout import Layout
from reference.paged import operations

Pools = Sequence[np.ndarray]


def write(
    pools: Pools,
    cache: Any,
    layer: int,
    tag: str | None,
    blocks: Sequence[int],
    states: Sequence[int],
    values: Mapping[str, np.ndarray],
) -> int:
    """Twin of `hkv.dialects.rtp_llm.data_plane.write`, in place; returns the number of slots that did not exist."""
    pages, index = cache.pages_of(layer, tag)
    missing = 0
    for name, content in values.items():
        layout = pages.layout_of(name)
        missing = operations.write(pools[pages.pool], layout, index, blocks, states, {name: content})
    return missing


def gather(
    pools: Pools, cache: Any, layer: int, tag: str | None, table: Sequence[int], dtypes: Mapping[str, np.dtype]
) -> tuple[dict[str, np.ndarray], int]:
    """Twin of `gather`, of the parts that `dtypes` names."""
    pages, index = cache.pages_of(layer, tag)
    found: dict[str, np.ndarray] = {}
    missing = 0
    for name, dtype in dtypes.items():
        layout = pages.layout_of(name)
        one, missing = operations.gather(pools[pages.pool], layout, index, table, {name: dtype})
        found |= one
    return found, missing


def scatter(
    pools: Pools, cache: Any, layer: int, tag: str | None, table: Sequence[int], values: Mapping[str, np.ndarray]
) -> int:
    """Twin of `scatter`, in place; returns the number of ids that did not exist."""
    pages, index = cache.pages_of(layer, tag)
    missing = 0
    for name, content in values.items():
        missing = operations.scatter(pools[pages.pool], pages.layout_of(name), index, table, {name: content})
    return missing


def copy(pools: Pools, cache: Any, tag: str, sources: Sequence[int], targets: Sequence[int]) -> int:
    """Twin of `copy`, in place, by the spans of bytes that RTP-LLM copies; returns the number of bad pairs."""
    group = next(group for group in cache.plan.groups if group.tag == tag)
    before = [pool.copy() for pool in pools]
    missing = 0
    for source, target in zip(sources, targets, strict=True):
        if -1 in (source, target):
            continue
        if not (0 <= source < group.num_blocks and 0 <= target < group.num_blocks):
            missing += 1
            continue
        for old, new in cache.addresses.copies(source, target, tag):
            kept = before[old.pool][old.offset : old.offset + old.size]
            pools[new.pool][new.offset : new.offset + new.size] = kept
    return missing


def zero(pools: Pools, cache: Any, tag: str, blocks: Sequence[int]) -> int:
    """Twin of `zero`, in place; returns the number of ids that did not exist."""
    missing = 0
    for pool, layout in _layouts(cache, tag):
        missing = operations.zero_blocks(pools[pool], layout, blocks)
    return missing


def _layouts(cache: Any, tag: str) -> Iterator[tuple[int, Layout]]:
    for pages in cache.pages[tag]:
        for layout in pages.layouts:
            yield pages.pool, layout

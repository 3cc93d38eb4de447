"""Moves, zeros and attention in the pools of a planned cache, by layer and tag. Jitted; pools are donated.

Pools are flat arrays of unsigned words, one or one a group. Blocks and their scales move together; a group's copies and
zeros go through the layers of draft modules too. Block 0, which is never handed out, and -1 stand for no block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hkv import paged
from hkv.dialects.rtp_llm.planned_cache import PlannedCache
from hkv.errors import LayoutError
from hkv.layout.block_layout import Layout
from hkv.paged.operations import kernel_blocks

Pools = tuple[jax.Array, ...]
Values = Mapping[str, jax.Array]
"""Parts of a layer's cache by name: `key`, `value`, `key_scale`, `latent`, `state`, `entry`, ..."""


def on_device(cache: PlannedCache) -> Pools:
    """New pools as JAX arrays, uint8 `[size]` each, as `PlannedCache.pools` fills them."""
    return jax.device_put(cache.pools())


def write(
    pools: Pools,
    cache: PlannedCache,
    layer: int,
    tag: str | None,
    blocks: jax.Array,
    states: jax.Array,
    values: Values,
    *,
    in_kernel_blocks: bool = False,
    implementation: str | None = None,
) -> tuple[Pools, jax.Array]:
    """New content of some states of a layer, such as a step's keys and values and their scales.

    Args:
      pools: the cache's pools, donated.
      cache: the planned cache.
      layer: index of the layer.
      tag: its group; None for a layer of one group.
      blocks: int32 `[n]`, block of each; -1 writes nothing. No slot twice.
      states: int32 `[n]`, token, or entry, within the block.
      values: per part `[n, heads, *shape]` of the part's dtype.
      in_kernel_blocks: `blocks` are ids of kernel blocks (RTP-LLM's second index), `states` places in them.
      implementation: as in `hkv.paged.write`.

    Returns:
      The pools, and how many slots did not exist (int32).

    Raises:
      LayoutError: no such layer or tag, a part that the layer has not, or values of another shape or dtype.
    """
    pages, index = cache.pages_of(layer, tag)
    dropped: jax.Array = jnp.int32(0)
    for layout, mine in _by_layout(cache, layer, tag, values):
        used = kernel_blocks(layout) if in_kernel_blocks else layout
        pool, missing = paged.write(pools[pages.pool], used, index, blocks, states, mine, implementation)
        pools, dropped = _with(pools, pages.pool, pool), jnp.maximum(dropped, missing)
    return pools, dropped


def gather(
    pools: Pools,
    cache: PlannedCache,
    layer: int,
    tag: str | None,
    table: jax.Array,
    parts: Sequence[str] | None = None,
    *,
    in_kernel_blocks: bool = False,
    implementation: str | None = None,
) -> tuple[dict[str, jax.Array], jax.Array]:
    """The states of the blocks that a list of a request names, one after the other.

    Args:
      pools: the cache's pools.
      cache: the planned cache.
      layer: index of the layer.
      tag: its group; None for a layer of one group.
      table: int32 `[blocks]`; -1 and 0 read as zeros, as ids do that do not exist.
      parts: names of the parts wanted; None for all.
      in_kernel_blocks: `table` names kernel blocks; those of block 0 are real ones then, and -1 alone is none.
      implementation: as in `hkv.paged.gather`.

    Returns:
      Per part `[blocks * states in a block, heads, *shape]`, and how many ids did not exist (int32).

    Raises:
      LayoutError: no such layer, tag or part.
    """
    pages, index = cache.pages_of(layer, tag)
    names = list(parts) if parts is not None else [part.name for each in pages.layouts for part in each.content]
    found: dict[str, jax.Array] = {}
    dropped: jax.Array = jnp.int32(0)
    for layout in pages.layouts:
        mine = tuple(name for name in names if pages.layout_of(name) == layout)
        if mine:
            used, null = (kernel_blocks(layout), -1) if in_kernel_blocks else (layout, 0)
            some, dropped = paged.gather(pools[pages.pool], used, index, table, mine, null, implementation)
            found |= some
    return {name: found[name] for name in names}, dropped


def attention(
    pools: Pools,
    cache: PlannedCache,
    layer: int,
    tag: str | None,
    query: jax.Array,
    table: jax.Array,
    cu_q_lens: jax.Array,
    kv_lens: jax.Array,
    *,
    in_kernel_blocks: bool = False,
    **options: Any,
) -> jax.Array:
    """Causal attention of ragged queries over a layer's pages, as `hkv.paged.attention` has it.

    Args:
      pools: the cache's pools.
      cache: the planned cache.
      layer: index of the layer.
      tag: its group; None for a layer of one group.
      query: float `[tokens, query heads, elements]`.
      table: int32 `[rows, columns]`; -1 and 0 read as zeros.
      cu_q_lens: int32 `[rows + 1]`, where each row's queries begin, and where the last ones end.
      kv_lens: int32 `[rows]`, tokens of each row in the pools.
      in_kernel_blocks: as in `gather`.
      **options: further ones of `hkv.paged.attention`, such as `window` and `scale`.

    Returns:
      `[tokens, query heads, value elements]` of the query's dtype.

    Raises:
      LayoutError: no such layer or tag, or pages without keys and values, or with scales apart from them.
    """
    pages, index = cache.pages_of(layer, tag)
    scales = [part.name for each in pages.layouts[1:] for part in each.content if part.name.endswith("_scale")]
    if scales:
        raise LayoutError("layer", layer, f"one whose scales lie in its pages; apart from them are {', '.join(scales)}")
    layout, null = pages.layouts[0], 0
    if in_kernel_blocks:
        layout, null = kernel_blocks(layout), -1
    how = {"null_block": null, **options}
    return paged.attention(pools[pages.pool], layout, index, query, table, cu_q_lens, kv_lens, **how)


def scatter(
    pools: Pools,
    cache: PlannedCache,
    layer: int,
    tag: str | None,
    table: jax.Array,
    values: Values,
    *,
    implementation: str | None = None,
) -> tuple[Pools, jax.Array]:
    """The inverse of `gather`: whole blocks from contiguous states.

    Args:
      pools: the cache's pools, donated.
      cache: the planned cache.
      layer: index of the layer.
      tag: its group; None for a layer of one group.
      table: int32 `[blocks]`; -1, 0 and ids that do not exist are skipped. No id twice.
      values: per part `[blocks * states in a block, heads, *shape]`.
      implementation: as in `hkv.paged.scatter`.

    Returns:
      The pools, and how many ids did not exist (int32).

    Raises:
      LayoutError: as `write`.
    """
    pages, index = cache.pages_of(layer, tag)
    dropped: jax.Array = jnp.int32(0)
    for layout, mine in _by_layout(cache, layer, tag, values):
        pool, dropped = paged.scatter(pools[pages.pool], layout, index, table, mine, 0, implementation)
        pools = _with(pools, pages.pool, pool)
    return pools, dropped


def copy(
    pools: Pools,
    cache: PlannedCache,
    tag: str,
    sources: jax.Array,
    targets: jax.Array,
    *,
    implementation: str | None = None,
) -> tuple[Pools, jax.Array]:
    """Copies blocks of a group in all of its layers, drafts' too, with their scales: what `fork` asks for.

    Args:
      pools: the cache's pools, donated.
      cache: the planned cache.
      tag: the group.
      sources: int32 `[copies]`.
      targets: int32 `[copies]`; none twice. A pair with a -1 copies nothing.
      implementation: as in `hkv.paged.copy_blocks`.

    Returns:
      The pools, and how many pairs named a block that does not exist (int32).

    Raises:
      LayoutError: no such tag.
    """
    dropped: jax.Array = jnp.int32(0)
    for pool, layout in _layouts(cache, tag):
        copied, dropped = paged.copy_blocks(pools[pool], layout, sources, targets, implementation)
        pools = _with(pools, pool, copied)
    return pools, dropped


def zero(
    pools: Pools, cache: PlannedCache, tag: str, blocks: jax.Array, *, implementation: str | None = None
) -> tuple[Pools, jax.Array]:
    """Zeros blocks of a group in all of its layers, drafts' too, with their scales; padding stays.

    Args:
      pools: the cache's pools, donated.
      cache: the planned cache.
      tag: the group.
      blocks: int32 `[blocks]`; -1 zeros nothing.
      implementation: as in `hkv.paged.zero_blocks`.

    Returns:
      The pools, and how many ids did not exist (int32).

    Raises:
      LayoutError: no such tag.
    """
    dropped: jax.Array = jnp.int32(0)
    for pool, layout in _layouts(cache, tag):
        zeroed, dropped = paged.zero_blocks(pools[pool], layout, blocks, implementation)
        pools = _with(pools, pool, zeroed)
    return pools, dropped


def _by_layout(
    cache: PlannedCache, layer: int, tag: str | None, values: Values
) -> list[tuple[Layout, dict[str, jax.Array]]]:
    """Values by the layout that has their parts."""
    pages, _ = cache.pages_of(layer, tag)
    found = {name: pages.layout_of(name) for name in values}
    chosen = ((layout, [name for name in values if found[name] == layout]) for layout in pages.layouts)
    return [(layout, {name: values[name] for name in names}) for layout, names in chosen if names]


def _layouts(cache: PlannedCache, tag: str) -> list[tuple[int, Layout]]:
    """Every layout of a group's bytes, with its pool."""
    if tag not in cache.pages:
        raise LayoutError("tag", tag, f"one of {', '.join(cache.pages)}")
    return [(pages.pool, layout) for pages in cache.pages[tag] for layout in pages.layouts]


def _with(pools: Pools, index: int, pool: jax.Array) -> Pools:
    return (*pools[:index], pool, *pools[index + 1 :])

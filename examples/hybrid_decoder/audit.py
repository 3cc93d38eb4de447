"""A watch kept inside the loop: shadow tags say what every slot holds, and what nobody may read becomes NaN.

A slot's tag names the whole prefix that ends in it. Every step, each row's tables are followed to all that the next
query reads, and tags that are not those of the row's own prefix are counted. Blocks that are free and cannot be found
are filled with NaN, and so are blocks that have just been handed out; one NaN that mattered would show in the logits.
Work is in time of the pool's size: for tests, and for those who want to see it.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from examples.hybrid_decoder.model import DELTA, Model
from examples.hybrid_decoder.paged import Addresses, block_at
from hkv.cache.state import StepState
from hkv.layout.block_layout import Layout

NAN = 0x7FC0DEAD
"""A quiet NaN's bits."""


def prefix_tags(history: jax.Array) -> jax.Array:
    """A number for every prefix of rows of tokens int32[R, N]: uint32[R, N], never 0."""
    factor = jnp.uint32(0x9E3779B1)
    powers = jnp.cumprod(jnp.full(history.shape[1], factor, jnp.uint32))
    mixed = (history.astype(jnp.uint32) + 1) * powers
    return jnp.cumsum(mixed, axis=1, dtype=jnp.uint32) | 1


def poison(
    pool: jax.Array, tags: jax.Array, layout: Layout, before: StepState, after: StepState
) -> tuple[jax.Array, jax.Array]:
    """NaN into all pages of blocks that a step handed out, or that are neither held nor registered after it."""
    gone = (after.refs == 0) | ((before.refs < 2) & (after.refs >= 2))
    gone = gone[: layout.num_blocks]
    order = layout.order.value
    outer = order[: 1 + max(order.index("L"), order.index("B"))]
    sizes = {"L": layout.shape[0], "B": layout.num_blocks, "H": layout.shape[2]}
    shape = [sizes[axis] for axis in outer]
    inner = gone.reshape([layout.num_blocks if axis == "B" else 1 for axis in outer] + [1])
    pool = jnp.where(inner, jnp.uint32(NAN), pool.reshape(*shape, -1)).reshape(-1)
    return pool, jnp.where(gone[:, None], 0, tags)


def wrong_reads(model: Model, tags: jax.Array, names: jax.Array, where: Addresses) -> jax.Array:
    """Number of slots read by rows with new tokens that hold something else than the row's prefix, int32[]."""
    wrong = jnp.int32(0)
    busy = (where.counts > 0)[:, None]
    for kind in model.kinds:
        size, table = model.block_of(kind), where.tables[:, model.group(kind)]
        position = jnp.arange(names.shape[1])
        if kind == DELTA:
            block = block_at(table, (where.start - 1) // size)
            read = busy & (position == where.start[:, None] - 1)
            found = jnp.broadcast_to(tags[block, 0][:, None], names.shape)
        else:
            read = busy & _readable(model, kind, position, where.start[:, None])
            block = jnp.take(table, position // size, axis=1)
            found = tags[block, position % size]
        wrong += jnp.sum(read & (found != names), dtype=jnp.int32)
    return wrong


def _readable(model: Model, kind: str, position: jax.Array, query: jax.Array) -> jax.Array:
    """Tokens before a query that it reads, as `hkv.spec` says: bool[R, N]."""
    first: Mapping[str, jax.Array] = {
        "window": query - model.window + 1,
        "chunked": query // model.chunk * model.chunk,
    }
    return (position < query) & (position >= first.get(kind, jnp.zeros_like(query)))


def tag(model: Model, tags: jax.Array, names: jax.Array, where: Addresses, settled: jax.Array) -> jax.Array:
    """Tags of what a step wrote.

    Args:
      model: the sizes.
      tags: uint32[blocks, tokens].
      names: from `prefix_tags`.
      where: the step's addresses.
      settled: int32[R], tokens after which recurrent states were written.
    """
    position = where.start[:, None] + jnp.arange(where.blocks.shape[2])
    name = jnp.take_along_axis(names, jnp.minimum(position, names.shape[1] - 1), axis=1)
    for kind in model.kinds:
        if kind == DELTA:
            last = jnp.take_along_axis(names, jnp.maximum(settled - 1, 0)[:, None], axis=1)[:, 0]
            tags = tags.at[jnp.where(where.states >= 0, where.states, tags.shape[0]), 0].set(last, mode="drop")
        else:
            group = model.group(kind)
            block = where.blocks[:, group]
            block = jnp.where(block >= 0, block, tags.shape[0])
            tags = tags.at[block, where.offsets[:, group]].set(name, mode="drop")
    return tags

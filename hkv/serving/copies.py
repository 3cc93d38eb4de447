"""Copies of blocks that a step asks for, made in the pages of all layers."""

# jax.numpy types some of its own arguments as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from hkv.cache.spans import running_sum
from hkv.cache.state import PAD
from hkv.layout.block_layout import Layout
from hkv.paged import operations as paged
from hkv.serving.pages import LayerPages

LANES = 4
"""Copies that are made beside one another."""


def copied(pool: jax.Array, layers: Sequence[LayerPages], copies: jax.Array) -> jax.Array:
    """The pool with every block copied in all layers of its group, in time of the copies that there are.

    Args:
      pool: uint32[words].
      layers: every layer's place.
      copies: int32[Q, G, 2], of `hkv.cache.state.StepResult`: no block is a source and a target.
    """
    for group, layout in dict.fromkeys((layer.group, layer.layout) for layer in layers):
        pool = _copied(pool, layout, copies[:, group])
    return pool


def _copied(pool: jax.Array, layout: Layout, pairs: jax.Array) -> jax.Array:
    """The pool with the blocks of `pairs` int32[Q, 2] copied in all layers of a layout."""
    due = pairs[:, 0] >= 0
    turn = running_sum(due)
    lanes = -(-pairs.shape[0] // LANES) * LANES
    place = jnp.where(due, turn - 1, lanes)
    packed = jnp.full_like(pairs, PAD, shape=(lanes, 2)).at[place].set(pairs, mode="drop")

    def some(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first, pages = carry
        now = lax.dynamic_slice_in_dim(packed, first, LANES)
        pages, _ = paged.copy_blocks(pages, layout, now[:, 0], now[:, 1])
        return first + LANES, pages

    return lax.while_loop(lambda carry: carry[0] < turn[-1], some, (jnp.zeros_like(turn[-1]), pool))[1]

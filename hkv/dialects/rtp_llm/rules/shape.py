"""Shape of a group's lists: all slots of a full group have blocks, of others the last ones and those on a grid."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from hkv.dialects.rtp_llm.rules.parameters import CacheField, GroupField, View
from hkv.dialects.rtp_llm.rules.slot_mapper import effective_tokens
from hkv.state.loops import Scalar, ceil_divide, remainder


class Shape(NamedTuple):
    """Parameters of a group's lists; see `GroupField`. `step` is in blocks."""

    group: Scalar
    pool: Scalar
    block: Scalar
    step: Scalar
    tail: Scalar
    kept: Scalar
    grid: Scalar
    full: Scalar
    linear: Scalar
    checked: Scalar


def shape_of(view: View, group: Scalar) -> Shape:
    """Parameters of a group's lists."""
    return Shape(
        group=group,
        pool=view.pool_of(group),
        block=view.group(group, GroupField.BLOCK),
        step=view.whole(CacheField.STEP),
        tail=view.group(group, GroupField.TAIL),
        kept=view.group(group, GroupField.KEPT),
        grid=view.flag(group, GroupField.GRID),
        full=view.flag(group, GroupField.FULL),
        linear=view.flag(group, GroupField.LINEAR),
        checked=view.group(group, GroupField.CHECKED),
    )


def slots(shape: Shape, tokens: Scalar) -> Scalar:
    """Slots that `tokens` tokens fill, the last maybe in part."""
    return ceil_divide(tokens, shape.block)


def total(shape: Shape, tokens: Scalar, reserve: Scalar) -> Scalar:
    """Slots for `tokens` tokens and a reserve: in tokens, but for linear groups, where it is one more than slots."""
    states = slots(shape, tokens) + jnp.maximum(reserve - 1, 0)
    return jnp.where(shape.linear, states, slots(shape, tokens + reserve))


def effective(view: View, group: Scalar, tokens: Scalar) -> Scalar:
    """The length for which a group allocates on this rank (RTP-LLM `effectiveSeqLenForAlloc`)."""
    dealt = view.flag(group, GroupField.DEALT)
    return effective_tokens(tokens, view.whole(CacheField.BLOCK), view.whole(CacheField.RANKS), dealt)


def on_grid(shape: Shape, position: Scalar, reuse: Scalar) -> Scalar:
    """True if the block at a position is kept for requests that reuse it."""
    return shape.grid & reuse & (remainder(position + 1, shape.step) == 0)


def has_block(shape: Shape, position: Scalar, filled: Scalar, reserve: Scalar, reuse: Scalar) -> Scalar:
    """True if an allocation brings a block to a slot.

    Args:
      shape: the group.
      position: a slot of those that the allocation makes.
      filled: slots that tokens fill; those after them are the reserve's.
      reserve: tokens to come.
      reuse: True if the request's blocks may be reused.
    """
    reserved = (reserve > 0) & (position >= filled)
    last = (position >= filled - shape.tail) & (position < filled)
    return reserved | last | on_grid(shape, position, reuse)

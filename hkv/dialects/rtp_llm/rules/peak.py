"""Number of blocks that a request will hold at most until it ends (RTP-LLM `estimateBatchPeakNeedBlocks`)."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from hkv.dialects.rtp_llm.rules.admit import longest_list
from hkv.dialects.rtp_llm.rules.parameters import CacheField, Shape, View, has_block, on_grid, shape_of, slots, total
from hkv.state.loops import Scalar, loop, remainder
from hkv.state.pooled_workspace import PooledWorkspace

WRITES = ("rows", "requests")
"""Arrays that an estimate writes: only spare elements."""


class Outlook(NamedTuple):
    """A request and what is to come. Lengths are in tokens; `width`: sequences it will have.

    Attributes:
      slot, batch, seq, common, reserve: the request.
      remaining: tokens to come.
      reuse: whether states on the grid are kept.
      width: sequences it will have, at least `batch`.
      fresh: whether it holds nothing yet.
    """

    slot: Scalar
    batch: Scalar
    seq: Scalar
    common: Scalar
    reserve: Scalar
    remaining: Scalar
    reuse: Scalar
    width: Scalar
    fresh: Scalar


def batch_peak(work: PooledWorkspace, view: View, outlook: Outlook, enabled: Scalar) -> tuple[PooledWorkspace, Scalar]:
    """Blocks beyond those it has that a request holds at its peak.

    Args:
      work: needs `WRITES` to write.
      view: the configuration.
      outlook: the request; `fresh` is found here.
      enabled: whether to ask; 0 where not.
    """
    work, held = longest_list(work, view, outlook.slot, enabled)
    outlook = outlook._replace(fresh=held == 0, common=jnp.clip(outlook.common, 0, outlook.seq))

    def one(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        group, most = local
        w, own = _group_peak(w, outlook, shape_of(view, group))
        return w, (group + 1, most + own)

    end = jnp.where(enabled, view.num_groups, 0)
    work, (_, most) = loop(lambda c: c[0] < end, one, work, (0, 0), writes=WRITES)
    partial = remainder(outlook.seq, view.whole(CacheField.BLOCK)) != 0
    forked = jnp.where(partial, outlook.width - outlook.batch, 0)
    return work, jnp.where(enabled, jnp.where(outlook.fresh, most, outlook.width * most + forked), 0)


def _group_peak(work: PooledWorkspace, outlook: Outlook, shape: Shape) -> tuple[PooledWorkspace, Scalar]:
    work, length, blocks = _held(work, outlook, shape)
    common = slots(shape, outlook.common)
    last = slots(shape, outlook.seq + outlook.remaining + outlook.reserve)
    first_peak = common + outlook.width * jnp.maximum(last - common, 0)
    window = last - jnp.where(shape.full, length, blocks)
    plain = jnp.where(outlook.fresh, first_peak, jnp.maximum(window, 0))
    work, states = _linear_peak(work, outlook, shape, length)
    held = jnp.where(outlook.fresh, 0, blocks)
    return work, jnp.where(shape.linear, jnp.maximum(states - held, 0), plain)


def _held(work: PooledWorkspace, outlook: Outlook, shape: Shape) -> tuple[PooledWorkspace, Scalar, Scalar]:
    """Slots of the first sequence's list, and those of them that have a block."""

    def size(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        del local
        return w, (False, w.read("requests", w.length(outlook.slot, 0, shape.group)))

    def body(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        position, count = local
        return w, (position + 1, count + (w.read("rows", row + position) != 0))

    row = work.row(outlook.slot, 0, shape.group)
    work, (_, length) = loop(lambda c: c[0], size, work, (shape.group >= 0, 0), reads=("requests",))
    work, (_, blocks) = loop(lambda c: c[0] < length, body, work, (0, 0), reads=("rows",))
    return work, length, blocks


def _linear_peak(
    work: PooledWorkspace, outlook: Outlook, shape: Shape, length: Scalar
) -> tuple[PooledWorkspace, Scalar]:
    """The most that all slots cost while a list grows slot by slot, a cleanup after each.

    A slot costs 1 if it has a block, and one for each sequence where every sequence has its own.
    """
    row = work.row(outlook.slot, 0, shape.group)
    common, filled = slots(shape, outlook.common), slots(shape, outlook.seq)
    start = jnp.where(length > 0, length, jnp.maximum(total(shape, outlook.seq, outlook.reserve), common))
    shared = jnp.where(outlook.fresh, common, 0)
    each = jnp.where(outlook.fresh, outlook.width, 1)

    def cost(w: PooledWorkspace, position: Scalar) -> Scalar:
        block = w.read("rows", row + jnp.where((length > 0) & (position < length), position, 0))
        early = has_block(shape, position, common, jnp.int32(0), outlook.reuse)
        late = has_block(shape, position, filled, outlook.reserve, outlook.reuse)
        planned = jnp.where(position < shared, early.astype(jnp.int32), each * late)
        known = jnp.where(length > 0, (block != 0).astype(jnp.int32), planned)
        return jnp.where(position < start, known, each)

    def add(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        position, now = local
        return w, (position + 1, now + cost(w, position))

    def grow(w: PooledWorkspace, local: tuple[Scalar, ...]) -> tuple[PooledWorkspace, tuple[Scalar, ...]]:
        size, now, most, cleaned = local
        size, now = size + 1, now + each
        most = jnp.maximum(most, now)

        def clean(v: PooledWorkspace, at: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
            position, left = at
            goes = ~on_grid(shape, position, outlook.reuse)
            return v, (position + 1, left - jnp.where(goes, cost(v, position), 0))

        end = size - shape.kept - outlook.reserve
        w, (cleaned, now) = loop(lambda c: c[0] < end, clean, w, (cleaned, now), reads=("rows",))
        return w, (size, now, most, cleaned)

    begin = jnp.where(shape.linear, 0, start)
    work, (_, now) = loop(lambda c: c[0] < start, add, work, (begin, 0), reads=("rows",))
    end = jnp.where(shape.linear, total(shape, outlook.seq + outlook.remaining, outlook.reserve), 0)
    work, (_, _, most, _) = loop(lambda c: c[0] < end, grow, work, (start, now, now, 0), writes=("rows",))
    return work, most

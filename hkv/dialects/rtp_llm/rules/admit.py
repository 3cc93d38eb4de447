"""The verdict on a new request: whether what it takes fits into the pools beside the reserve, ever or now."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from hkv.dialects.rtp_llm.rules.parameters import (
    CacheField,
    GroupField,
    Shape,
    View,
    effective,
    has_block,
    shape_of,
    slots,
    total,
)
from hkv.state.loops import Scalar, divide, loop, peek, remainder
from hkv.state.pooled import PoolCounter
from hkv.state.pooled_workspace import PooledWorkspace


class Ask(NamedTuple):
    """Lengths that a request asks slots for, in tokens: `seq` it has in each sequence, `length` get slots, `common` are
    shared, `reserve` may come. `reuse`: True if its blocks may be reused."""

    slot: Scalar
    batch: Scalar
    seq: Scalar
    length: Scalar
    common: Scalar
    reserve: Scalar
    reuse: Scalar


class Capacity(NamedTuple):
    """The verdict (RTP-LLM `evaluateInitCapacity`), all in blocks.

    Attributes:
      never: the pools are too small.
      not_now: too much of them is held.
      need: blocks that the request takes, over all groups.
      available: blocks that nobody holds but the cache, over all pools.
    """

    never: Scalar
    not_now: Scalar
    need: Scalar
    available: Scalar


def need(view: View, work: PooledWorkspace, shape: Shape, ask: Ask, reused: Scalar) -> tuple[Scalar, Scalar]:
    """Blocks that a first allocation takes in one group: for all sequences, and for each (RTP-LLM `getNeed`).

    Args:
      view: the configuration.
      work: a workspace, of which nothing is read.
      shape: the group.
      ask: the request.
      reused: slots that it has already.
    """
    common, seq = effective(view, shape.group, ask.common), effective(view, shape.group, ask.seq)
    shared, filled, whole = slots(shape, common), slots(shape, seq), total(shape, seq, ask.reserve)

    def body(w: PooledWorkspace, local: tuple[Scalar, ...]) -> tuple[PooledWorkspace, tuple[Scalar, ...]]:
        position, first, rest = local
        early = (position < shared) & has_block(shape, position, shared, jnp.int32(0), ask.reuse)
        late = has_block(shape, position, filled, ask.reserve, ask.reuse)
        fresh = ~(ask.reuse & (position == reused - 1))
        own = jnp.where(shape.linear, late & ~early & fresh, late & (position >= reused) & (position < filled))
        return w, (position + 1, first + (shape.linear & early & fresh), rest + own)

    _, (_, first, rest) = loop(lambda c: c[0] < whole, body, work, (jnp.where(shape.full, whole, 0), 0, 0))
    window = jnp.maximum(whole - jnp.maximum(filled, reused), 0)
    rest = rest + jnp.where(shape.linear, 0, window)
    credit = jnp.where(ask.reuse, jnp.clip(reused, 0, shared), 0)
    first = jnp.where(shape.full, shared - credit, first)
    return first, jnp.where(shape.full, jnp.maximum(whole - shared, 0), rest)


def capacity(work: PooledWorkspace, view: View, ask: Ask, enabled: Scalar) -> tuple[PooledWorkspace, Capacity]:
    """Verdict on whether the pools have room for a request (RTP-LLM `evaluateInitCapacity`).

    With one pool, every group is credited with the longest list's slots, whatever its own length. With a pool a group
    each is judged alone, and has its part of the reserve.

    Args:
      work: needs `requests` and `counters` to write, of which only spare elements are written.
      view: the configuration.
      ask: the request.
      enabled: whether to ask; everything fits where not.
    """
    groups, apart = view.num_groups, view.whole(CacheField.APART) != 0
    reserve = view.whole(CacheField.RESERVE)
    work, longest = longest_list(work, view, ask.slot, enabled)
    work, available, sharing = _available(work, view, enabled)

    def body(w: PooledWorkspace, local: tuple[Scalar, ...]) -> tuple[PooledWorkspace, tuple[Scalar, ...]]:
        i, count, never, not_now = local
        alone = i >= groups
        shape = shape_of(view, i - jnp.where(alone, groups, 0))
        pool = shape.pool
        w, (own, held) = peek(
            i >= 0,
            lambda v: (
                v.read("requests", v.length(ask.slot, 0, shape.group)),
                v.read("counters", v.pool_counter(pool, PoolCounter.HELD)),
            ),
            w,
            ("requests", "counters"),
            (0, 0),
        )
        first, rest = need(view, w, shape, ask, jnp.where(alone, own, longest))
        mine = first + ask.batch * rest
        whole = view.group(pool, GroupField.TOTAL)
        shares = ~view.flag(shape.group, GroupField.EXPLICIT)
        of_total = scaled(w, reserve, jnp.where(shares & alone, whole, 0), view.whole(CacheField.SHARING))
        of_rest = scaled(w, reserve, jnp.where(shares & alone, whole - held, 0), sharing)
        asked = alone & (mine > 0)
        never = never | (asked & (mine + of_total > whole))
        not_now = not_now | (asked & (mine + of_rest > whole - held))
        return w, (i + 1, count + jnp.where(alone, 0, mine), never, not_now)

    end = jnp.where(enabled, groups * (1 + apart.astype(jnp.int32)), 0)
    work, (_, count, never, not_now) = loop(
        lambda c: c[0] < end, body, work, (0, 0, False, False), writes=("requests", "counters")
    )
    asked = enabled & ~apart & (count > 0)
    return work, Capacity(
        never=never | (asked & (count + reserve > view.whole(CacheField.TOTAL))),
        not_now=not_now | (asked & (count + reserve > available)),
        need=count,
        available=available,
    )


def longest_list(work: PooledWorkspace, view: View, slot: Scalar, enabled: Scalar) -> tuple[PooledWorkspace, Scalar]:
    """Slots of the longest list of a request's first sequence, holes included; 0 means that it holds nothing yet.

    Args:
      work: needs `requests` to read.
      view: the configuration.
      slot: the request.
      enabled: whether to look; 0 where not.
    """

    def body(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        group, most = local
        return w, (group + 1, jnp.maximum(most, w.read("requests", w.length(slot, 0, group))))

    end = jnp.where(enabled, view.num_groups, 0)
    work, (_, most) = loop(lambda c: c[0] < end, body, work, (0, 0), reads=("requests",))
    return work, most


def _available(work: PooledWorkspace, view: View, enabled: Scalar) -> tuple[PooledWorkspace, Scalar, Scalar]:
    """Blocks of all pools, and of those with a part of the reserve, that nobody but the cache holds."""

    def body(w: PooledWorkspace, local: tuple[Scalar, ...]) -> tuple[PooledWorkspace, tuple[Scalar, ...]]:
        pool, everywhere, sharing = local
        left = view.group(pool, GroupField.TOTAL) - w.read("counters", w.pool_counter(pool, PoolCounter.HELD))
        explicit = view.flag(pool, GroupField.EXPLICIT)
        return w, (pool + 1, everywhere + left, sharing + jnp.where(explicit, 0, left))

    end = jnp.where(enabled, view.whole(CacheField.POOLS), 0)
    work, (_, everywhere, sharing) = loop(lambda c: c[0] < end, body, work, (0, 0, 0), reads=("counters",))
    return work, everywhere, sharing


def scaled(work: PooledWorkspace, number: Scalar, part: Scalar, whole: Scalar) -> Scalar:
    """`number * part // whole`, whose product may have more than 31 bits; 0 for a whole of 0.

    Args:
      work: a workspace, of which nothing is read.
      number: below 2**31.
      part: at most `whole`.
      whole: below 2**29.
    """
    divisor = jnp.maximum(whole, 1)

    def body(w: PooledWorkspace, local: tuple[Scalar, ...]) -> tuple[PooledWorkspace, tuple[Scalar, ...]]:
        bit, quotient, rest = local
        rest = 2 * rest + jnp.where((number >> bit) & 1, part, 0)
        return w, (bit - 1, 2 * quotient + divide(rest, divisor), remainder(rest, divisor))

    busy = (number > 0) & (part > 0) & (whole > 0)
    _, (_, quotient, _) = loop(lambda c: c[0] >= 0, body, work, (jnp.where(busy, 30, -1), 0, 0))
    return quotient

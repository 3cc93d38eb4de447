"""The verdict on a new request: whether what it takes fits into the pools without the reserve, ever or now.

RTP-LLM `evaluateInitCapacity` asks twice: before a hit is looked for, with the pools' totals (never: permanent), and
after it, with what is available (not now: may be tried again). Available is what no request and no connector holds,
whatever the cache has: eviction gets that later. `getNeed` has a formula for each group type; here all types walk over
the slots of their list with one predicate (`has_block`), so that types are data. Scheduling's upper bound
(`estimateBatchPeakNeedBlocks`) walks over the same slots, and stands below.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from hkv.dialects.rtp_llm.rules.parameters import (
    CacheField,
    GroupField,
    RtpView,
    Shape,
    effective,
    has_block,
    on_grid,
    shape_of,
    slots,
    total,
)
from hkv.state.loops import Scalar, divide, loop, remainder
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
    """The verdict (RTP-LLM `evaluateInitCapacity`): the pools are too small; too much of them is held; blocks that the
    request takes, over all groups; blocks that only the cache references, over all pools."""

    never: Scalar
    not_now: Scalar
    need: Scalar
    available: Scalar


def need(view: RtpView, work: PooledWorkspace, shape: Shape, ask: Ask, reused: Scalar) -> tuple[Scalar, Scalar]:
    """Blocks that a first allocation takes in one group: for all sequences, and for each (RTP-LLM `getNeed`).

    `reused` slots it has already, which count only where it reuses. Nothing is read of `work`.
    """
    reused = jnp.where(ask.reuse, reused, 0)
    # Under context parallelism a rank holds its share of the blocks, and asks for as many tokens as fill those.
    common, seq = effective(view, shape.group, ask.common), effective(view, shape.group, ask.seq)
    shared, filled, whole = slots(shape, common), slots(shape, seq), total(shape, seq, ask.reserve)

    def body(w: PooledWorkspace, local: tuple[Scalar, ...]) -> tuple[PooledWorkspace, tuple[Scalar, ...]]:
        # Slot by slot, where RTP-LLM has a formula for each group type: LINEAR groups have holes, whose number
        # depends on the step, the tail and the reserve at once.
        position, first, rest = local
        early = (position < shared) & has_block(shape, position, shared, jnp.int32(0), ask.reuse)
        late = has_block(shape, position, filled, ask.reserve, ask.reuse)
        # Of a hit, a LINEAR group brings one block: that under the last key.
        fresh = position != reused - 1
        own = jnp.where(shape.linear, late & ~early & fresh, late & (position >= reused) & (position < filled))
        return w, (position + 1, first + (shape.linear & early & fresh), rest + own)

    _, (_, first, rest) = loop(lambda c: c[0] < whole, body, work, (jnp.where(shape.full, whole, 0), 0, 0))
    window = jnp.maximum(whole - jnp.maximum(filled, reused), 0)
    rest = rest + jnp.where(shape.linear, 0, window)
    # FULL groups are credited with all that was reused, as far as it lies in what the sequences share.
    first = jnp.where(shape.full, shared - jnp.clip(reused, 0, shared), first)
    return first, jnp.where(shape.full, jnp.maximum(whole - shared, 0), rest)


def capacity(work: PooledWorkspace, view: RtpView, ask: Ask, enabled: Scalar) -> tuple[PooledWorkspace, Capacity]:
    """Verdict on whether the pools have room for a request (RTP-LLM `evaluateInitCapacity`).

    With one pool, every group is credited with the longest list's slots, whatever its own length. With a pool a group
    each is judged alone, and has its part of the reserve. Everything fits where not `enabled`.
    """
    apart, reserve = view.whole(CacheField.APART) != 0, view.whole(CacheField.RESERVE)
    work, longest = longest_list(work, view, ask.slot, enabled)
    work, available, sharing = _available(work, view, enabled)

    def body(w: PooledWorkspace, local: tuple[Scalar, ...]) -> tuple[PooledWorkspace, tuple[Scalar, ...]]:
        group, count, never, not_now = local
        shape = shape_of(view, group)
        pool = shape.pool
        slots_of = ("requests", w.length(ask.slot, 0, shape.group))
        w, (own, held) = w.peek_each(group >= 0, slots_of, ("counters", w.pool_counter(pool, PoolCounter.HELD)))
        # RTP-LLM counts every group of a shared pool as though it had the longest list: `getNeedBlocks` takes one
        # number.
        first, rest = need(view, w, shape, ask, jnp.where(apart, own, longest))
        mine = first + ask.batch * rest
        whole = view.group(pool, GroupField.TOTAL)
        shares = ~view.flag(shape.group, GroupField.EXPLICIT)
        of_total = scaled(w, reserve, jnp.where(shares & apart, whole, 0), view.whole(CacheField.SHARING))
        of_rest = scaled(w, reserve, jnp.where(shares & apart, whole - held, 0), sharing)
        asked = apart & (mine > 0)
        never = never | (asked & (mine + of_total > whole))
        # `HELD` counts blocks that a request or a connector holds: what the cache alone has is available.
        not_now = not_now | (asked & (mine + of_rest > whole - held))
        return w, (group + 1, count + mine, never, not_now)

    end = jnp.where(enabled, view.num_groups, 0)
    work, (_, count, never, not_now) = loop(
        lambda c: c[0] < end, body, work, (0, 0, False, False), writes=("requests", "counters")
    )
    asked = enabled & ~apart & (count > 0)
    return work, Capacity(
        # Permanent: not even an empty pool would do. The other verdict is retryable.
        never=never | (asked & (count + reserve > view.whole(CacheField.TOTAL))),
        not_now=not_now | (asked & (count + reserve > available)),
        need=count,
        available=available,
    )


def longest_list(work: PooledWorkspace, view: RtpView, slot: Scalar, enabled: Scalar) -> tuple[PooledWorkspace, Scalar]:
    """Slots of the longest list of a request's first sequence, holes included; 0 means that it holds nothing yet."""

    def body(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        group, most = local
        return w, (group + 1, jnp.maximum(most, w.read("requests", w.length(slot, 0, group))))

    end = jnp.where(enabled, view.num_groups, 0)
    work, (_, most) = loop(lambda c: c[0] < end, body, work, (0, 0), reads=("requests",))
    return work, most


def _available(work: PooledWorkspace, view: RtpView, enabled: Scalar) -> tuple[PooledWorkspace, Scalar, Scalar]:
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
    """`number * part // whole`, whose product may have more than 31 bits; 0 if `whole` is. `part <= whole < 2**29`."""
    divisor = jnp.maximum(whole, 1)

    def body(w: PooledWorkspace, local: tuple[Scalar, ...]) -> tuple[PooledWorkspace, tuple[Scalar, ...]]:
        # Long division, bit by bit: RTP-LLM multiplies in 64 bits, which JAX has not unless a program asks for it.
        bit, quotient, rest = local
        rest = 2 * rest + jnp.where((number >> bit) & 1, part, 0)
        return w, (bit - 1, 2 * quotient + divide(rest, divisor), remainder(rest, divisor))

    busy = (number > 0) & (part > 0) & (whole > 0)
    _, (_, quotient, _) = loop(lambda c: c[0] >= 0, body, work, (jnp.where(busy, 30, -1), 0, 0))
    return quotient


# Number of blocks that a request will hold at most until it ends (RTP-LLM `estimateBatchPeakNeedBlocks`).

WRITES = ("rows", "requests")
"""Arrays that an estimate writes: only spare elements."""


class Outlook(NamedTuple):
    """A request and the tokens to come (`remaining`), in tokens. `reuse`: states on the grid are kept; `width`:
    sequences it will have, at least `batch`; `fresh`: it holds nothing yet, which `batch_peak` finds."""

    slot: Scalar
    batch: Scalar
    seq: Scalar
    common: Scalar
    reserve: Scalar
    remaining: Scalar
    reuse: Scalar
    width: Scalar
    fresh: Scalar


def batch_peak(
    work: PooledWorkspace, view: RtpView, outlook: Outlook, enabled: Scalar
) -> tuple[PooledWorkspace, Scalar]:
    """Blocks beyond those it has that a request holds at its peak."""
    work, held = longest_list(work, view, outlook.slot, enabled)
    outlook = outlook._replace(fresh=held == 0, common=jnp.clip(outlook.common, 0, outlook.seq))

    def one(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        group, most = local
        w, own = _group_peak(w, outlook, shape_of(view, group))
        return w, (group + 1, most + own)

    end = jnp.where(enabled, view.num_groups, 0)
    work, (_, most) = loop(lambda c: c[0] < end, one, work, (0, 0), writes=WRITES)
    partial = remainder(outlook.seq, view.whole(CacheField.BLOCK)) != 0
    # A last block that is not full is copied for each new sequence.
    forked = jnp.where(partial, outlook.width - outlook.batch, 0)
    return work, jnp.where(enabled, jnp.where(outlook.fresh, most, outlook.width * most + forked), 0)


def _group_peak(work: PooledWorkspace, outlook: Outlook, shape: Shape) -> tuple[PooledWorkspace, Scalar]:
    work, length, blocks = _held(work, outlook, shape)
    common = slots(shape, outlook.common)
    last = slots(shape, outlook.seq + outlook.remaining + outlook.reserve)
    # What the prompt's sequences share exists once, everything after it once a sequence.
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
        # The peak is not at the end: each cleanup gives blocks back, so that the list may have cost most before it.
        size, now = size + 1, now + each
        most = jnp.maximum(most, now)

        def clean(v: PooledWorkspace, at: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
            position, left = at
            goes = ~on_grid(shape, position, outlook.reuse)
            return v, (position + 1, left - jnp.where(goes, cost(v, position), 0))

        # `removeSkippedBlocks` leaves the last blocks and the reserve alone.
        end = size - shape.kept - outlook.reserve
        w, (cleaned, now) = loop(lambda c: c[0] < end, clean, w, (cleaned, now), reads=("rows",))
        return w, (size, now, most, cleaned)

    begin = jnp.where(shape.linear, 0, start)
    work, (_, now) = loop(lambda c: c[0] < start, add, work, (begin, 0), reads=("rows",))
    end = jnp.where(shape.linear, total(shape, outlook.seq + outlook.remaining, outlook.reserve), 0)
    work, (_, _, most, _) = loop(lambda c: c[0] < end, grow, work, (start, now, now, 0), writes=("rows",))
    return work, most

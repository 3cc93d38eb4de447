"""Chunks that a request offers to the second tier, compiled: collected, and those known counted as used.

The twin of `reference.dialects.vllm.offload.offers` and of the connector's stores. What a request's blocks were is
known from what steps told of them: a window's block that it gave up is offered still, unless it was handed out since.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp

from hkv.dialects.vllm.rules.offload import arc, lru, pool, states, tracker
from hkv.dialects.vllm.rules.offload.parameters import TierField, TierNumber
from hkv.dialects.vllm.rules.offload.pool import Prefix
from hkv.dialects.vllm.rules.offload.words import FOREVER, Handed, SlotWord, ToldRow
from hkv.dialects.vllm.rules.parameters import GroupField
from hkv.dialects.vllm.rules.retire import Kept
from hkv.state.loops import Scalar, divide, guarded, loop, remainder
from hkv.state.state import Row

ENDLESS = 1 << 30


class Telling(NamedTuple):
    """Telling of a request's blocks that were handed out or adopted in a step.

    Attributes:
      slot: its slot.
      step: the step.
      whole: whether all of its blocks are told; else those since the last that was.
      begins: whether all that it has is offered anew.
      listed: whether it may offer them; else it has to wait for a load first.
    """

    slot: Scalar
    step: Scalar
    whole: Scalar
    begins: Scalar
    listed: Scalar


def tell(w: Any, view: Any, telling: Telling, enabled: Scalar) -> Any:
    """Tells of a request's blocks; jobs that read any of them are flushed."""
    slot, step, whole, begins, listed = telling
    hands = pool.HAND_WRITES if w.room.again else ("keys", *pool.FLUSH_WRITES)

    def of_group(v: Any, carried: tuple[Scalar]) -> tuple[Any, tuple[Scalar]]:
        group = carried[0]
        v, (length, first) = v.peek_row(group >= 0, slot, group, Row.LENGTH, Row.FIRST)
        v, (told,) = v.peek(group >= 0, "tables", v.told_word(slot, group, ToldRow.LENGTH))
        row = v.row(slot, group)
        window = view.tier.group(group, TierField.WINDOW) > 0
        passed_by = jnp.int32(0)
        if v.room.again:
            v, (cursor,) = v.peek(whole & ~begins, "tables", v.told_word(slot, group, ToldRow.CURSOR))
            passed_by = jnp.where(view.tier.number(TierNumber.REVIVES) != 0, cursor, 0)
        else:
            window = window & ~whole

        def fast(u: Any, at: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
            place, _ = at
            block = u.read("rows", row + place)
            u = u.write("keys", step, u.handed_word(block, Handed.STEP))
            since = jnp.where(place < passed_by, FOREVER, step) if u.room.again else step
            u = u.write("told", since, jnp.where(window, row + place, u.told.shape[0] - 1))
            return u, (place + 1, u.read("keys", u.handed_word(block, Handed.FENCE)) != 0)

        def stretch(u: Any, at: tuple[Scalar]) -> tuple[Any, tuple[Scalar]]:
            u, (place, fenced) = loop(
                lambda c: (c[0] < length) & ~c[1],
                fast,
                u,
                (at[0], False),
                reads=("rows",),
                writes=("keys", "told"),
            )

            def flush(x: Any, _: tuple[()]) -> tuple[Any, tuple[()]]:
                x, (block,) = x.peek(fenced, "rows", row + place - 1)
                x, (job,) = x.peek(fenced, "keys", x.handed_word(block, Handed.FENCE))
                return pool.flush_readers(x, block, job, step, fenced & (block != 0)), ()

            return guarded(fenced, flush, u, (), ("rows", "keys"))[0], (place,)

        start = jnp.where(whole, jnp.minimum(first, length), told)
        writes = ("rows", "told", *hands)
        v, _ = loop(lambda c: c[0] < length, stretch, v, (start,), writes=writes)
        spare = v.tables.shape[0] - 1
        v = v.write("tables", jnp.where(listed, length, 0), v.told_word(slot, group, ToldRow.LENGTH))
        for word, value, when in (
            (ToldRow.FIRST, first, whole),
            (ToldRow.WHOLE, length, whole),
            (ToldRow.CURSOR, 0, begins),
        ):
            v = v.write("tables", value, jnp.where(when, v.told_word(slot, group, word), spare))
        return v, (group + 1,)

    groups = jnp.where(enabled, view.num_groups, 0)
    writes = ("rows", "requests", "tables", "told", *hands)
    w, _ = loop(lambda c: c[0] < groups, of_group, w, (0,), writes=writes)
    return w.write_if(enabled & whole, "tables", step, w.slot_word(slot, SlotWord.STEP))


def tell_copies(w: Any, step: Scalar, enabled: Scalar) -> Any:
    """Tells of the blocks that a step copies others into; jobs that read any of them are flushed."""

    def one(v: Any, at: tuple[Scalar]) -> tuple[Any, tuple[Scalar]]:
        v, (block,) = v.peek(at[0] >= 0, "copies", v.output("copies", at[0]) + 2)
        v = v.write("keys", step, v.handed_word(block, Handed.STEP))
        v, (job,) = v.peek(at[0] >= 0, "keys", v.handed_word(block, Handed.FENCE))
        return pool.flush_readers(v, block, job, step, job != 0), (at[0] + 1,)

    count = jnp.where(enabled, w.num_copies, 0)
    return loop(lambda c: c[0] < count, one, w, (0,), writes=("copies", *pool.HAND_WRITES))[0]


def collect(
    w: Any, view: Any, slot: Scalar, prefix: Prefix, tokens: Scalar, named: Scalar, about: Any, enabled: Scalar
) -> tuple[Any, Scalar, Scalar]:
    """Collects what a request offers of its first `tokens` tokens and the tier lacks; what it has counts as used.

    `named`: tokens whose prefixes have names. `about`: its prompt, its shared prefix, and whether it finished. Returns
    how many chunks are lacked, and how many of the others are idle.
    """
    width = w.sizes.buckets.groups
    prompt, shared_boundary, finished = about
    w = w.replace(stamp=w.stamp + enabled)
    tracks = w.room.tracked > 0
    w, (told_step,) = w.peek(enabled, "tables", w.slot_word(slot, SlotWord.STEP))

    def of_group(v: Any, carried: tuple[Scalar, ...], lists: bool = False) -> tuple[Any, tuple[Scalar, ...]]:
        group, count, idle = carried
        size, scale = view.group(group, GroupField.BLOCK), view.group(group, GroupField.SCALE)
        words = (ToldRow.LENGTH, ToldRow.FIRST, ToldRow.WHOLE, ToldRow.CURSOR)
        v, (told, null, all_told, cursor) = v.peek(
            group >= 0, "tables", *(v.told_word(slot, group, word) for word in words)
        )
        stop = jnp.minimum(jnp.minimum(divide(tokens, size), divide(named, size)), told)
        if v.room.states:
            stop = jnp.where(states.is_state(view, group), 0, stop)
        kept = _kept(view, group, prompt, shared_boundary, stop, finished)
        begin, last = cursor, divide(prompt, size)
        if v.room.again:
            again = finished & (stop != last) & _offers_again(view, group)
            begin = jnp.where(again, jnp.minimum(cursor, stop - remainder(stop, kept.period)), cursor)
        row, chain, bit = v.row(slot, group), v.chain(slot) + (scale - 1), jnp.left_shift(jnp.int32(1), group)
        marks, window = prefix.start + (scale - 1), view.tier.group(group, TierField.WINDOW) > 0
        spare = v.marks.shape[0] - 1

        def look(u: Any, place: Scalar) -> tuple[Scalar, Scalar, Scalar]:
            block = jnp.where(place >= null, u.read("rows", row + place), 0)
            since = u.read("told", row + place)
            if not u.room.again:
                since = jnp.where(place < all_told, told_step, since)
            gone = window & (u.read("keys", jnp.where(window, u.handed_word(block, Handed.STEP), 0)) > since)
            key = u.read("chains", chain + place * scale)
            entry = key * width + group
            return jnp.where(gone, 0, block), entry, u.read("where", entry)

        def fast(u: Any, at: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
            place, phase, inside, count, mark, marked, _ = at
            u = u.write("marks", marked, mark)
            block, entry, value = look(u, place)
            offered = (block != 0) & (inside | (phase >= kept.least))
            if u.room.again:
                # Before the cursor only what the prompt's end did not ask for.
                asked = (phase >= kept.least) | ((place >= last - kept.keep) & (place < last))
                offered = offered & ((place >= cursor) | ~asked)
            lacked = offered if lists else offered & (value <= 0)
            known = offered & ~lacked
            if tracks and not lists:
                lacked = lacked & tracker.is_worth(u, view, entry)
            mark = marks + place * scale
            words = (entry, block, mark) if u.room.arc else (entry, block)
            for word, each in enumerate(words):
                u = u.write("offers", each, jnp.where(lacked, u.offer(count) + word, u.offers.shape[0] - 1))
            marked = u.read("marks", mark) | bit
            mark = jnp.where(lacked & (not (lists or u.room.arc)), mark, spare)
            return u, (place + 1, kept.next_phase(phase), inside, count + lacked, mark, marked, known)

        def stretch(u: Any, at: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
            place, count, idle = at
            inside, until = kept.stretch(place, stop)
            place = kept.skip(place, inside, until)
            looked = ("rows", "told", "keys", "chains")
            u, (place, _, _, count, mark, marked, known) = loop(
                lambda c: (c[0] < until) & ~c[-1],
                fast,
                u,
                (place, kept.phase(place), inside, count, spare, 0, False),
                reads=(*looked, "where", *(tracker.WRITES if tracks else ())),
                writes=("marks", "offers"),
            )
            u = u.write("marks", marked, mark)
            u, (key,) = u.peek(known, "chains", chain + (place - 1) * scale)
            u, (value,) = u.peek(known, "where", key * width + group)
            unit = place * scale - 1
            u, was, _ = pool.use(u, known, value - 1, prefix, unit, group, jnp.int32(0))
            return u, (place, count, idle + was)

        writes = ("rows", "told", "keys", "chains", "where", "offers", *pool.USE_WRITES, *more)
        v, (_, count, idle) = loop(lambda c: c[0] < stop, stretch, v, (begin, count, idle), writes=writes)
        return v, (group + 1, count, idle)

    groups = jnp.where(enabled, view.num_groups, 0)
    more = tracker.WRITES if tracks else ()
    writes = ("tables", "rows", "told", "keys", "chains", "where", "offers", *pool.USE_WRITES, *more)
    if tracks:
        of_all = functools.partial(of_group, lists=True)
        w, (_, offered, _) = loop(lambda c: c[0] < groups, of_all, w, (0, 0, 0), writes=writes)
        w = tracker.count(w, view, offered)
    w, (_, count, idle) = loop(lambda c: c[0] < groups, of_group, w, (0, 0, 0), writes=writes)
    if w.room.arc:
        w = arc.miss(w, view.tier, count)
    else:
        w = lru.enlist(w, enabled, prefix, count > 0)
    return w, count, idle


def _kept(view: Any, group: Scalar, prompt: Scalar, shared_boundary: Scalar, stop: Scalar, finished: Scalar) -> Kept:
    """Chunks that are offered: all, or the tails of segments and those before expected ends."""
    tier, size = view.tier, view.group(group, GroupField.BLOCK)
    masked, keep = tier.group(group, TierField.MASKED) != 0, tier.group(group, TierField.KEEP)
    period, alignment = tier.group(group, TierField.PERIOD), jnp.maximum(tier.number(TierNumber.ALIGNMENT), 1)
    ends, horizon = tier.group(group, TierField.ENDS) != 0, tier.group(group, TierField.HORIZON) != 0

    def end(tokens: Scalar, there: Scalar) -> Scalar:
        whole = divide(divide(jnp.maximum(tokens, 0), alignment) * alignment, size)
        return jnp.where(masked & there, whole, 0)

    last = divide(prompt, size)
    settled = jnp.where(finished, stop, jnp.where(stop <= last, last, 0))
    return Kept(
        period=jnp.where(masked, period, 1),
        least=jnp.where(masked, period - keep, 0),
        shift=jnp.int32(0),
        keep=keep,
        ends=(
            end(prompt - 1, ends),
            end(shared_boundary, ends & (shared_boundary > 0)),
            jnp.where(masked & horizon, settled, 0),
        ),
    )


def _offers_again(view: Any, group: Scalar) -> Scalar:
    """True if requests that finish offer the last segment's end of a group again, of what they generated, too."""
    dense = view.tier.group(group, TierField.HORIZON) != 0
    return dense & (view.tier.number(TierNumber.PROMPT_ONLY) == 0)


def passed(w: Any, view: Any, slot: Scalar, tokens: Scalar, limit: Scalar, stored: Scalar, enabled: Scalar) -> Any:
    """Moves a request's cursors past what it offered, where there was room; from which length on it has more.

    `limit`: tokens that it may ever offer, as far as is known.
    """

    def of_group(v: Any, carried: tuple[Scalar, Scalar]) -> tuple[Any, tuple[Scalar, Scalar]]:
        group, nearest = carried
        size = view.group(group, GroupField.BLOCK)
        words = (ToldRow.LENGTH, ToldRow.CURSOR)
        v, (told, cursor) = v.peek(group >= 0, "tables", *(v.told_word(slot, group, word) for word in words))
        stop = jnp.minimum(divide(tokens, size), told)
        if v.room.again:
            v = _pass_by(v, view, slot, group, cursor, jnp.where(stored, stop, 0))
        cursor = jnp.where(stored, jnp.maximum(cursor, stop), cursor)
        v = v.write("tables", cursor, v.told_word(slot, group, ToldRow.CURSOR))
        more = (cursor + 1) * size
        never = more > limit
        if v.room.states:
            never = never | states.is_state(view, group)
        return v, (group + 1, jnp.minimum(nearest, jnp.where(never, ENDLESS, more)))

    groups = jnp.where(enabled, view.num_groups, 0)
    more = ("rows", "keys", "told") if w.room.again else ()
    w, (_, nearest) = loop(lambda c: c[0] < groups, of_group, w, (0, ENDLESS), writes=("tables", *more))
    return w.write_if(enabled, "tables", jnp.where(stored, nearest, 0), w.slot_word(slot, SlotWord.OFFERS))


def _pass_by(w: Any, view: Any, slot: Scalar, group: Scalar, begin: Scalar, end: Scalar) -> Any:
    """Takes note of which blocks of entries that a cursor passes are gone: later on vLLM 0.33 does not look (defect
    `RESET_REVIVES`)."""
    row, spare = w.row(slot, group), w.told.shape[0] - 1
    v, (null,) = w.peek(group >= 0, "tables", w.told_word(slot, group, ToldRow.FIRST))

    def one(u: Any, at: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        place, value, before = at
        u = u.write("told", value, before)
        block, since = u.read("rows", row + place), u.read("told", row + place)
        gone = u.read("keys", u.handed_word(block, Handed.STEP)) > since
        return u, (place + 1, jnp.where(gone, -1, FOREVER), row + place)

    revives = _offers_again(view, group) & (view.tier.number(TierNumber.REVIVES) != 0)
    stop = jnp.where(revives, end, begin)
    start = (jnp.maximum(begin, null), 0, spare)
    v, (_, value, before) = loop(lambda c: c[0] < stop, one, v, start, reads=("rows", "keys"), writes=("told",))
    return v.write("told", value, before)

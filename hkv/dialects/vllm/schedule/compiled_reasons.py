"""Reasons why a cache hit ended where it did, compiled: the twin of `schedule.diagnosis`."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from hkv.dialects.vllm.rules import admit
from hkv.dialects.vllm.rules.parameters import CacheField, GroupField, View
from hkv.dialects.vllm.schedule import diagnosis
from hkv.dialects.vllm.schedule.compiled_state import ScheduleWorkspace
from hkv.replay.reasons import EVICTED as WAS_EVICTED
from hkv.replay.reasons import NEVER_SEEN as WAS_NEVER_SEEN
from hkv.replay.reasons import NOT_RETAINED as WAS_NOT_RETAINED
from hkv.replay.schedule_state import FATE, SEARCH, Searching
from hkv.state.key_table import was_evicted
from hkv.state.loops import Scalar, divide, loop, remainder, when
from hkv.state.state import EVICTED, NEVER_SEEN, NOT_RETAINED, RETIRED

READS = ("table", "chains")
WRITES = ("table", "chains", "fates")
"""Arrays that finding the reasons writes; `table` and `chains` only in their spare elements."""

WHOLE, WAITING, SHORT, NOT_SHARED, OFF = (
    diagnosis.REASONS.index(reason)
    for reason in (
        diagnosis.WHOLE_PROMPT,
        diagnosis.WAITING,
        diagnosis.FELL_SHORT,
        diagnosis.NOT_SHARED,
        diagnosis.CACHING_OFF,
    )
)
OF_ABSENCE = {
    NEVER_SEEN: diagnosis.REASONS.index(WAS_NEVER_SEEN),
    EVICTED: diagnosis.REASONS.index(WAS_EVICTED),
    RETIRED: diagnosis.REASONS.index(diagnosis.RETIRED),
    NOT_RETAINED: diagnosis.REASONS.index(WAS_NOT_RETAINED),
}
ENDLESS = (1 << 30) - 1


class Lookup(NamedTuple):
    """A lookup just made.

    Attributes:
      slot: slot of the waiting request.
      request: its number in the trace.
      tokens: tokens it has.
      hit: tokens the lookup found.
      reach: tokens up to which the prefixes seen before can have taken it.
      keys: prefix keys it has, output included.
    """

    slot: Scalar
    request: Scalar
    tokens: Scalar
    hit: Scalar
    reach: Scalar
    keys: Scalar


class _Search(NamedTuple):
    """A lookup that ended: the request's slot, what it hit, the furthest boundary, the step between two, its keys."""

    slot: Scalar
    hit: Scalar
    top: Scalar
    step: Scalar
    keys: Scalar


class _Group:
    """One group: which blocks it needs to resume at a boundary. `EAGLE` holds the tokens of a draft's proof.

    `sinks`: blocks at the beginning that it needs beside those from `start` on. `chunked`: what is needed begins anew
    at some boundaries, so that a block that nobody ever had may not be needed further on.
    """

    def __init__(self, view: View, group: Scalar) -> None:
        self.view, self.group = view, group
        self.block = view.group(group, GroupField.BLOCK)
        self.hash_block = view.whole(CacheField.HASH_BLOCK)
        self.scale = view.group(group, GroupField.SCALE)
        self.column = view.group(group, GroupField.COLUMN)
        self.recurrent = view.group(group, GroupField.RECURRENT) != 0
        self.chunked = view.group(group, GroupField.REACH) == 0
        self.sinks = view.group(group, GroupField.SINKS)
        self.proof = view.group(group, GroupField.EAGLE)
        self.shared = view.group(group, GroupField.CACHEABLE) != 0

    def start(self, boundary: Scalar) -> Scalar:
        """The first block that is needed."""
        return divide(admit.skipped_tokens(self.view, self.group, boundary), self.block)

    def stop(self, boundary: Scalar) -> Scalar:
        """The block after the last that is needed."""
        return divide(boundary + self.proof, self.block)

    def reads_all(self, boundary: Scalar) -> Scalar:
        """True if everything before the boundary is needed."""
        return ~self.recurrent & (admit.skipped_tokens(self.view, self.group, boundary) == 0)

    def open(self, search: _Search, boundary: Scalar) -> Scalar:
        """The first needed block that the hit itself does not show to be cached."""
        known = jnp.where(self.reads_all(boundary), divide(search.hit, self.block), 0)
        return jnp.maximum(self.start(boundary), known)

    def value(self, w: ScheduleWorkspace, search: _Search, index: Scalar) -> Scalar:
        """Value of the key table for a block."""
        return self._value(w, search, (index + 1) * self.scale - 1)

    def _value(self, w: ScheduleWorkspace, search: _Search, place: Scalar) -> Scalar:
        key = w.read("chains", w.chain(search.slot) + place)
        return w.read("table", w.entry(key * w.sizes.buckets.groups + self.column))

    def whole(self, boundary: Scalar) -> Scalar:
        """True if what is needed at the boundary ends with a block."""
        return remainder(boundary + self.proof, self.block) == 0

    def tail(self, w: ScheduleWorkspace, search: _Search, boundary: Scalar) -> Scalar:
        """Value of the key table for the part of a block at the end of what is needed; 1, as if cached, for none."""
        place = divide(boundary + self.proof, self.hash_block) - 1
        value = self._value(w, search, jnp.maximum(place, 0))
        return jnp.where(self.whole(boundary), 1, value)


def diagnose(work: ScheduleWorkspace, view: View, lookup: Lookup, enabled: Scalar) -> ScheduleWorkspace:
    """Writes one reason and one search per group to the request's fate, for a lookup just made, before its blocks
    are allocated.

    Args:
      work: needs `WRITES` to write.
      view: the configuration, in which `EAGLE` is a draft's proof in tokens and `REACH` what queries read.
      lookup: the lookup.
      enabled: whether to do it.
    """

    def body(w: ScheduleWorkspace) -> ScheduleWorkspace:
        w = _diagnose(w, view, lookup)
        step = view.whole(CacheField.ALIGNMENT)
        search = _Search(lookup.slot, lookup.hit, lookup.reach, step, lookup.keys)
        return _search(w, view, search, lookup.request)

    return when(enabled, body, work, writes=WRITES)


def _diagnose(w: ScheduleWorkspace, view: View, lookup: Lookup) -> ScheduleWorkspace:
    slot, request, tokens, hit = lookup[:4]
    groups, caching = view.num_groups, view.whole(CacheField.CACHING) != 0
    step = view.whole(CacheField.ALIGNMENT)
    w, (_, furthest, shared) = loop(
        lambda c: c[0] < groups, lambda v, c: (v, _furthest(view, tokens, *c)), w, (0, ENDLESS, 0)
    )
    top = jnp.where(shared > 0, divide(jnp.maximum(furthest, 0), step) * step, 0)
    search = _Search(slot, hit, top, step, lookup.keys)
    searched = caching & (hit < top)

    def name(v: ScheduleWorkspace, local: tuple[Scalar, ...]) -> tuple[ScheduleWorkspace, tuple[Scalar, ...]]:
        number, every, previous = local
        v = v.write("fates", previous, jnp.where(number > 0, v.fate(request, FATE + number - 1), spare))
        group = _Group(view, jnp.minimum(number, groups - 1))
        mine = searched & group.shared & (number < groups)
        v, at = _resumes(v, group, search, hit + step, mine)
        v, missing, _ = _missing(v, group, search, hit + step, mine & (at == 0))
        reason = jnp.where(mine, jnp.where(at > 0, WAITING, missing), jnp.where(group.shared, WHOLE, NOT_SHARED))
        return v, (number + 1, every & ((at > 0) | ~mine), jnp.where(caching, reason, OFF))

    spare = w.fates.shape[0] - 1
    w, (_, every, _) = loop(lambda c: c[0] <= groups, name, w, (0, searched, 0), writes=WRITES)
    w, short = _all_resume(w, view, search, every)

    def shorten(v: ScheduleWorkspace, local: tuple[Scalar]) -> tuple[ScheduleWorkspace, tuple[Scalar]]:
        (number,) = local
        reason = jnp.where(view.group(number, GroupField.CACHEABLE) != 0, SHORT, NOT_SHARED)
        return v.write("fates", reason, v.fate(request, FATE + number)), (number + 1,)

    end = jnp.where(short, groups, 0)
    return loop(lambda c: c[0] < end, shorten, w, (0,), writes=("fates",))[0]


def _furthest(view: View, tokens: Scalar, number: Scalar, least: Scalar, shared: Scalar) -> tuple[Scalar, ...]:
    group = _Group(view, number)
    hash_block = view.whole(CacheField.HASH_BLOCK)
    mine = jnp.minimum(tokens - 1, divide(tokens, hash_block) * hash_block - group.proof)
    return number + 1, jnp.where(group.shared, jnp.minimum(least, mine), least), shared + group.shared


def _resumes(
    work: ScheduleWorkspace, group: _Group, search: _Search, first: Scalar, enabled: Scalar
) -> tuple[ScheduleWorkspace, Scalar]:
    """The first boundary from `first` on at which this group could resume, 0 for none."""
    last = group.start(search.top)
    work, wall, _ = _lacking_sink(work, group, search, search.top, enabled)

    def body(w: ScheduleWorkspace, local: tuple[Scalar, ...]) -> tuple[ScheduleWorkspace, tuple[Scalar, ...]]:
        boundary, index, lacking, _, _ = local
        looks = (index < group.stop(boundary)) & (lacking < ENDLESS)
        value = group.value(w, search, jnp.where(looks, index, 0))
        lacking = jnp.where(looks & (value <= 0), jnp.where(value == NEVER_SEEN, ENDLESS, index), lacking)
        start = group.start(boundary)
        found = ~looks & ((lacking < start) | (start >= group.stop(boundary)))
        found = found & (group.tail(w, search, boundary) > 0)
        failed = ~looks & ~found
        boundary = boundary + jnp.where(failed, search.step, 0)
        hopeless = (lacking >= last) & ((lacking < ENDLESS) | ~group.chunked)
        empty = start >= group.stop(boundary)
        on = (boundary <= search.top) & ~found & (~hopeless | empty) & (group.stop(boundary) <= wall)
        return w, (boundary, index + looks, lacking, on, found)

    enabled = enabled & (first <= search.top) & (group.stop(first) <= wall)
    start = (first, group.open(search, first), -1, enabled, False)
    work, (boundary, _, _, _, found) = loop(lambda c: c[3], body, work, start, reads=READS)
    return work, jnp.where(found, boundary, 0)


def _lacking_sink(
    work: ScheduleWorkspace, group: _Group, search: _Search, boundary: Scalar, enabled: Scalar
) -> tuple[ScheduleWorkspace, Scalar, Scalar]:
    """The first of the sinks' blocks that is needed at a boundary and not cached, `ENDLESS` for none; its value."""
    end = jnp.where(enabled, jnp.minimum(group.sinks, group.stop(boundary)), 0)

    def body(w: ScheduleWorkspace, local: tuple[Scalar, Scalar]) -> tuple[ScheduleWorkspace, tuple[Scalar, Scalar]]:
        index, _ = local
        return w, (index + 1, group.value(w, search, index))

    start = (divide(search.hit, group.block), 1)
    work, (index, value) = loop(lambda c: (c[0] < end) & (c[1] > 0), body, work, start, reads=READS)
    return work, jnp.where(value > 0, ENDLESS, index - 1), value


def _missing(
    work: ScheduleWorkspace, group: _Group, search: _Search, boundary: Scalar, enabled: Scalar
) -> tuple[ScheduleWorkspace, Scalar, Scalar]:
    """Reason why the block is missing that keeps this group from resuming at a boundary, and its value in the table."""
    work, lacking, absence = _lacking_sink(work, group, search, boundary, enabled)
    first, last = group.open(search, boundary), group.stop(boundary) - 1
    forward = group.reads_all(boundary)

    def body(w: ScheduleWorkspace, local: tuple[Scalar, ...]) -> tuple[ScheduleWorkspace, tuple[Scalar, ...]]:
        index, _, _ = local
        value = group.value(w, search, index)
        index = jnp.where(forward, index + 1, index - 1)
        return w, (index, value, (value > 0) & (index >= first) & (index <= last))

    start = (jnp.where(forward, first, last), absence, enabled & (first <= last) & (lacking == ENDLESS))
    work, (_, value, _) = loop(lambda c: c[2], body, work, start, reads=READS)
    work, tail = _missing_tail(work, group, search, boundary, enabled & (lacking == ENDLESS))
    value = jnp.where((tail <= 0) & (~forward | (value > 0)), tail, value)
    reason = jnp.int32(0)
    for absence, code in OF_ABSENCE.items():
        reason = jnp.where(value == absence, code, reason)
    return work, jnp.where(was_evicted(value), OF_ABSENCE[EVICTED], reason), value


def _missing_tail(
    work: ScheduleWorkspace, group: _Group, search: _Search, boundary: Scalar, enabled: Scalar
) -> tuple[ScheduleWorkspace, Scalar]:
    """`_Group.tail`; a tail that nobody had, of a block that somebody filled, was not retained."""

    def once(w: ScheduleWorkspace, _: tuple[Scalar, ...]) -> tuple[ScheduleWorkspace, tuple[Scalar, ...]]:
        value, index = group.tail(w, search, boundary), group.stop(boundary)
        known = (index + 1) * group.scale <= search.keys
        filled = known & (group.value(w, search, jnp.where(known, index, 0)) != NEVER_SEEN)
        return w, (False, jnp.where((value == NEVER_SEEN) & filled, NOT_RETAINED, value))

    work, (_, value) = loop(lambda c: c[0], once, work, (enabled & ~group.whole(boundary), 1), reads=READS)
    return work, value


def _search(w: ScheduleWorkspace, view: View, search: _Search, request: Scalar) -> ScheduleWorkspace:
    """Each group's side of the lookup, up to `search.top`: `hkv.replay.reasons.GroupSearch`, as `Searching` has it."""
    groups, caching = view.num_groups, view.whole(CacheField.CACHING) != 0
    spare = w.fates.shape[0] - SEARCH

    def body(v: ScheduleWorkspace, local: tuple[Scalar, ...]) -> tuple[ScheduleWorkspace, tuple[Scalar, ...]]:
        number, place, *found = local
        for column, value in zip(Searching, found, strict=True):
            v = v.write("fates", value, place + int(column))
        group = _Group(view, jnp.minimum(number, groups - 1))
        shared = caching & group.shared & (number < groups)
        mine = shared & (search.hit < search.top)
        v, resumes = _furthest_resumed(v, group, search, mine)
        v, computed = _computed(v, group, search, mine)
        lacks = mine & (resumes < search.top)
        v, missing, value = _missing(v, group, search, resumes + search.step, lacks)
        reason = jnp.where(shared, jnp.where(lacks, missing, WHOLE), jnp.where(caching, NOT_SHARED, OFF))
        place = jnp.where(number < groups, v.search(request, number), spare)
        return v, (number + 1, place, resumes, reason, computed, jnp.where(lacks & was_evicted(value), value, 0))

    return loop(lambda c: c[0] <= groups, body, w, (0, spare, 0, 0, 0, 0), writes=WRITES)[0]


def _furthest_resumed(
    work: ScheduleWorkspace, group: _Group, search: _Search, enabled: Scalar
) -> tuple[ScheduleWorkspace, Scalar]:
    """The furthest boundary at which this group could resume, the hit where there is none beyond it."""

    def body(w: ScheduleWorkspace, local: tuple[Scalar, ...]) -> tuple[ScheduleWorkspace, tuple[Scalar, ...]]:
        boundary, index, _, _ = local
        looks = index >= group.open(search, boundary)
        value = group.value(w, search, jnp.where(looks, index, 0))
        lacking = looks & (value <= 0)
        found = ~looks & (group.tail(w, search, boundary) > 0)
        # A boundary fails whose needed blocks include the one that is lacking: it must end before that one does.
        most = jnp.where(lacking, (index + 1) * group.block - 1 - group.proof, boundary - 1)
        fails = lacking | ~(looks | found)
        boundary = jnp.where(fails, divide(jnp.maximum(most, 0), search.step) * search.step, boundary)
        index = jnp.where(fails, group.stop(boundary) - 1, index - looks)
        return w, (boundary, index, ~found & (boundary > search.hit), found)

    work, wall, _ = _lacking_sink(work, group, search, search.top, enabled)
    most = jnp.maximum((wall + 1) * group.block - 1 - group.proof, 0)
    top = jnp.where(wall < ENDLESS, jnp.minimum(divide(most, search.step) * search.step, search.top), search.top)
    start = (top, group.stop(top) - 1, enabled & (top > search.hit), False)
    work, (boundary, _, _, found) = loop(lambda c: c[2], body, work, start, reads=READS)
    return work, jnp.where(found, boundary, search.hit)


def _computed(
    work: ScheduleWorkspace, group: _Group, search: _Search, enabled: Scalar
) -> tuple[ScheduleWorkspace, Scalar]:
    """The furthest boundary whose needed blocks somebody computed: blocks are computed in order, so by bisection."""
    stop = group.stop(search.top)

    def body(w: ScheduleWorkspace, local: tuple[Scalar, ...]) -> tuple[ScheduleWorkspace, tuple[Scalar, ...]]:
        low, high = local
        middle = divide(low + high, jnp.int32(2))
        never = group.value(w, search, middle) == NEVER_SEEN
        return w, (jnp.where(never, low, middle + 1), jnp.where(never, middle, high))

    start = (jnp.where(enabled, divide(search.hit, group.block), stop), stop)
    work, (seen, _) = loop(lambda c: c[0] < c[1], body, work, start, reads=READS)
    most = jnp.maximum((seen + 1) * group.block - 1 - group.proof, 0)
    most = jnp.maximum(search.hit, divide(most, search.step) * search.step)
    return work, jnp.where(enabled, jnp.where(seen >= stop, search.top, most), search.hit)


def _all_resume(
    work: ScheduleWorkspace, view: View, search: _Search, enabled: Scalar
) -> tuple[ScheduleWorkspace, Scalar]:
    """True if all shared groups could resume at one further boundary: each names the next one, until all agree."""
    groups = view.num_groups

    def body(w: ScheduleWorkspace, local: tuple[Scalar, ...]) -> tuple[ScheduleWorkspace, tuple[Scalar, ...]]:
        number, boundary, agreed, _ = local
        group = _Group(view, number)
        w, at = _resumes(w, group, search, boundary, group.shared)
        at = jnp.where(group.shared, at, boundary)
        agreed = jnp.where(at == boundary, agreed + 1, 1)
        return w, (jnp.where(number + 1 < groups, number + 1, 0), at, agreed, (at > 0) & (agreed < groups))

    start = (0, search.hit + search.step, 0, enabled)
    work, (_, at, _, _) = loop(lambda c: c[3], body, work, start, writes=READS)
    return work, enabled & (at > 0)

"""State of the blocks that a request would need beyond its hit, compiled: the twin of `schedule.Diagnosis`."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from hkv.dialects.vllm.rules import admit
from hkv.dialects.vllm.rules.parameters import CacheField, GroupField, View
from hkv.dialects.vllm.schedule.schedule import OF_ABSENCE, REASONS
from hkv.replay.observed import CACHING_OFF, HAD, NOT_SHARED, NOTHING
from hkv.replay.schedule_state import (
    RESULT_COLUMNS,
    SCHEDULE_ARRAYS,
    ScheduleArrays,
    ScheduleResident,
    Trace,
    empty_arrays,
)
from hkv.state.key_table import was_evicted
from hkv.state.loops import Scalar, divide, loop, remainder, when
from hkv.state.state import EVICTED, NEVER_SEEN, NOT_RETAINED, RETIRED, State
from hkv.state.workspace import ARRAYS, COUNTERS, OUTPUTS, Workspace

READS = ("table", "chains")
WRITES = ("table", "chains", "request_results")
"""Arrays that finding the reasons writes; `table` and `chains` only in their spare elements."""

CODES = {
    value: REASONS.index(OF_ABSENCE[absence])
    for value, absence in (
        (NEVER_SEEN, "never seen"),
        (EVICTED, "evicted"),
        (RETIRED, "retired"),
        (NOT_RETAINED, "not retained"),
    )
}
"""Places in `REASONS` by values of the key table."""

NOTHING_CODE, HAD_CODE, NOT_SHARED_CODE, OFF_CODE = map(REASONS.index, (NOTHING, HAD, NOT_SHARED, CACHING_OFF))
ENDLESS = (1 << 30) - 1


class Lookup(NamedTuple):
    """A lookup just made.

    Attributes:
      hit: tokens the lookup found.
      keys: prefix keys it has, output included.
    """

    slot: Scalar
    request: Scalar
    hit: Scalar
    asked: Scalar
    keys: Scalar


class _Group:
    """One group: which blocks it needs to resume at a boundary. `EAGLE` holds the tokens of a draft's proof.

    `sinks`: blocks at the beginning that it needs besides those from `start` on.
    """

    def __init__(self, view: View, group: Scalar) -> None:
        self.view, self.group = view, group
        self.block = view.group(group, GroupField.BLOCK)
        self.hash_block = view.whole(CacheField.HASH_BLOCK)
        self.scale = view.group(group, GroupField.SCALE)
        self.column = view.group(group, GroupField.COLUMN)
        self.recurrent = view.group(group, GroupField.RECURRENT) != 0
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

    def open(self, lookup: Lookup, boundary: Scalar) -> Scalar:
        """The first needed block that the hit itself does not show to be cached."""
        known = jnp.where(self.reads_all(boundary), divide(lookup.hit, self.block), 0)
        return jnp.maximum(self.start(boundary), known)

    def value(self, w: ScheduleWorkspace, lookup: Lookup, index: Scalar) -> Scalar:
        """Value of the key table for a block."""
        return self._value(w, lookup, (index + 1) * self.scale - 1)

    def _value(self, w: ScheduleWorkspace, lookup: Lookup, place: Scalar) -> Scalar:
        key = w.read("chains", w.chain(lookup.slot) + place)
        return w.read("table", w.entry(key * w.sizes.buckets.groups + self.column))

    def whole(self, boundary: Scalar) -> Scalar:
        """True if what is needed at the boundary ends with a block."""
        return remainder(boundary + self.proof, self.block) == 0

    def tail(self, w: ScheduleWorkspace, lookup: Lookup, boundary: Scalar) -> Scalar:
        """Value of the key table for the part of a block at the end of what is needed; 1, as if cached, for none."""
        place = divide(boundary + self.proof, self.hash_block) - 1
        value = self._value(w, lookup, jnp.maximum(place, 0))
        return jnp.where(self.whole(boundary), 1, value)


def diagnose(work: ScheduleWorkspace, view: View, lookup: Lookup, enabled: Scalar) -> ScheduleWorkspace:
    """Writes to a request's result up to where its blocks have been computed, and what each group lacks there.

    In `view`, `EAGLE` is a draft's proof in tokens and `LOOKBACK` what queries read.
    """
    return when(enabled, lambda w: _diagnose(w, view, lookup), work, writes=WRITES)


def _diagnose(w: ScheduleWorkspace, view: View, lookup: Lookup) -> ScheduleWorkspace:
    groups, caching = view.num_groups, view.whole(CacheField.CACHING) != 0
    asks = caching & (lookup.hit < lookup.asked)

    def least(v: ScheduleWorkspace, local: tuple[Scalar, Scalar]) -> tuple[ScheduleWorkspace, tuple[Scalar, Scalar]]:
        number, furthest = local
        group = _Group(view, number)
        v, computed = _computed(v, view, group, lookup, group.shared)
        return v, (number + 1, jnp.where(group.shared, jnp.minimum(furthest, computed), furthest))

    start = (0, jnp.where(asks, lookup.asked, lookup.hit))
    end = jnp.where(asks, groups, 0)
    w, (_, boundary) = loop(lambda c: c[0] < end, least, w, start, writes=READS)
    spare = w.request_results.shape[0] - 1

    def tell(v: ScheduleWorkspace, local: tuple[Scalar, ...]) -> tuple[ScheduleWorkspace, tuple[Scalar, ...]]:
        number, reason, eviction = local
        v = v.write(
            "request_results",
            reason,
            jnp.where(number > 0, v.request_result(lookup.request, RESULT_COLUMNS + number - 1), spare),
        )
        v = v.write("request_results", eviction, jnp.where(number > 0, v.eviction(lookup.request, number - 1), spare))
        group = _Group(view, jnp.minimum(number, groups - 1))
        mine = caching & group.shared & (number < groups) & (lookup.hit < boundary)
        v, missing, value = _missing(v, group, lookup, boundary, mine)
        reason = jnp.where(group.shared, jnp.where(mine, missing, NOTHING_CODE), NOT_SHARED_CODE)
        eviction = jnp.where(mine & was_evicted(value), value, 0)
        return v, (number + 1, jnp.where(caching, reason, OFF_CODE), eviction)

    w, _ = loop(lambda c: c[0] <= groups, tell, w, (0, 0, 0), writes=WRITES)
    return w.write("request_results", boundary, w.computed(lookup.request))


def _missing_sink(
    work: ScheduleWorkspace, group: _Group, lookup: Lookup, boundary: Scalar, enabled: Scalar
) -> tuple[ScheduleWorkspace, Scalar, Scalar]:
    """The first of the sinks' blocks that is needed at a boundary and not cached, `ENDLESS` for none; its value."""
    end = jnp.where(enabled, jnp.minimum(group.sinks, group.stop(boundary)), 0)

    def body(w: ScheduleWorkspace, local: tuple[Scalar, Scalar]) -> tuple[ScheduleWorkspace, tuple[Scalar, Scalar]]:
        index, _ = local
        return w, (index + 1, group.value(w, lookup, index))

    start = (divide(lookup.hit, group.block), 1)
    work, (index, value) = loop(lambda c: (c[0] < end) & (c[1] > 0), body, work, start, reads=READS)
    return work, jnp.where(value > 0, ENDLESS, index - 1), value


def _missing(
    work: ScheduleWorkspace, group: _Group, lookup: Lookup, boundary: Scalar, enabled: Scalar
) -> tuple[ScheduleWorkspace, Scalar, Scalar]:
    """Reason why the block is missing that keeps this group from resuming at a boundary, and its value in the table."""
    work, lacking, absence = _missing_sink(work, group, lookup, boundary, enabled)
    first, last = group.open(lookup, boundary), group.stop(boundary) - 1
    forward = group.reads_all(boundary)

    def body(w: ScheduleWorkspace, local: tuple[Scalar, ...]) -> tuple[ScheduleWorkspace, tuple[Scalar, ...]]:
        index, _, _ = local
        value = group.value(w, lookup, index)
        index = jnp.where(forward, index + 1, index - 1)
        return w, (index, value, (value > 0) & (index >= first) & (index <= last))

    start = (jnp.where(forward, first, last), absence, enabled & (first <= last) & (lacking == ENDLESS))
    work, (_, value, _) = loop(lambda c: c[2], body, work, start, reads=READS)
    work, tail = _missing_tail(work, group, lookup, boundary, enabled & (lacking == ENDLESS))
    value = jnp.where((tail <= 0) & (~forward | (value > 0)), tail, value)
    reason = jnp.int32(HAD_CODE)
    for absence, code in CODES.items():
        reason = jnp.where(value == absence, code, reason)
    return work, jnp.where(was_evicted(value), CODES[EVICTED], reason), value


def _missing_tail(
    work: ScheduleWorkspace, group: _Group, lookup: Lookup, boundary: Scalar, enabled: Scalar
) -> tuple[ScheduleWorkspace, Scalar]:
    """`_Group.tail`; a tail that nobody had, of a block that somebody filled, was not retained."""

    def once(w: ScheduleWorkspace, _: tuple[Scalar, ...]) -> tuple[ScheduleWorkspace, tuple[Scalar, ...]]:
        value, index = group.tail(w, lookup, boundary), group.stop(boundary)
        known = (index + 1) * group.scale <= lookup.keys
        filled = known & (group.value(w, lookup, jnp.where(known, index, 0)) != NEVER_SEEN)
        return w, (False, jnp.where((value == NEVER_SEEN) & filled, NOT_RETAINED, value))

    work, (_, value) = loop(lambda c: c[0], once, work, (enabled & ~group.whole(boundary), 1), reads=READS)
    return work, value


def _computed(
    work: ScheduleWorkspace, view: View, group: _Group, lookup: Lookup, enabled: Scalar
) -> tuple[ScheduleWorkspace, Scalar]:
    """The furthest boundary whose needed blocks somebody computed: blocks are computed in order, so by bisection."""
    stop, step = group.stop(lookup.asked), view.whole(CacheField.ALIGNMENT)

    def body(w: ScheduleWorkspace, local: tuple[Scalar, ...]) -> tuple[ScheduleWorkspace, tuple[Scalar, ...]]:
        low, high = local
        middle = divide(low + high, jnp.int32(2))
        never = group.value(w, lookup, middle) == NEVER_SEEN
        return w, (jnp.where(never, low, middle + 1), jnp.where(never, middle, high))

    start = (jnp.where(enabled, divide(lookup.hit, group.block), stop), stop)
    work, (seen, _) = loop(lambda c: c[0] < c[1], body, work, start, reads=READS)
    most = jnp.maximum((seen + 1) * group.block - 1 - group.proof, 0)
    most = jnp.maximum(lookup.hit, divide(most, step) * step)
    return work, jnp.where(enabled, jnp.where(seen >= stop, lookup.asked, most), lookup.hit)


# State of a compiled replay on the device: the cache, the requests on their way, the outcome of each.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DiagnosedTrace(Trace):
    """A `Trace` and what finding the reasons wants.

    Attributes:
      diagnosed: int32[groups, 16], `Parameters.groups` as `compiled_reasons` wants them.
    """

    diagnosed: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Resident(ScheduleResident):
    """A replay between two dispatches; donated.

    Attributes:
      cache: the cache.
    """

    cache: State


def begin(cache: State, requests: int, steps: int) -> Resident:
    """A replay in which nothing happened, as NumPy arrays."""
    slots, groups = cache.rows.shape[0] - 1, cache.rows.shape[1]
    return Resident(cache=cache, **empty_arrays(slots, slots, groups, requests, steps))


@dataclasses.dataclass(frozen=True)
class ScheduleWorkspace(Workspace, ScheduleArrays):
    """A `Workspace` with the arrays of a schedule."""

    CARRIED = (*Workspace.CARRIED, *SCHEDULE_ARRAYS)
    EVERYTHING = (*ARRAYS, *OUTPUTS, *COUNTERS, "num_ids", "num_events", "num_copies", *SCHEDULE_ARRAYS)
    """Arrays that one trip of a replay may write."""

"""History of each key, and reasons why hits ended, compiled: the twins of `KeyHistory` and of `RtpDiagnosis`."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hkv.dialects.rtp_llm.engines.numpy import EVICTED
from hkv.dialects.rtp_llm.rules.parameters import CacheField, GroupField, RtpView
from hkv.dialects.rtp_llm.schedule.agreement import REASONS
from hkv.replay.observed import CACHING_OFF, HAD, NOT_SHARED, NOTHING, RETIRED
from hkv.replay.schedule_state import (
    RESULT_COLUMNS,
    SCHEDULE_ARRAYS,
    Arriving,
    Number,
    ScheduleArrays,
    ScheduleResident,
    Trace,
    empty_arrays,
)
from hkv.state.loops import Scalar, divide, loop, peek, read, when
from hkv.state.pooled import SPARE, PooledState
from hkv.state.pooled_workspace import ARRAYS, OUTPUTS, PooledWorkspace
from hkv.state.status import Status

# State of a compiled replay under RTP-LLM's rules on the device.

VERDICTS = (Status.OK, Status.NO_ROOM_FOR_SEQUENCE, Status.NO_ROOM, Status.NOT_EVICTABLE)
"""Statuses with which an allocation may end in a replay."""

INSERTED = 1
"""The bit of a key's history that says that some request entered it; the next ones say in which groups."""

HISTORY = 2
"""Words of a key's history: the bits, and how many requests that hold blocks have the key."""


class RunTotals(NamedTuple):
    """Counts of a replay, as scalars.

    Attributes:
      granted, permanent, retryable, internal_error: verdicts on admissions, in the order of `VERDICTS`.
      grown, grown_permanent, grown_retryable, grown_internal_error: the same, to growing requests.
      entered: blocks that the cache took.
      cached_peak: most blocks that it held when a step's blocks were allocated.
      duplicates: blocks that it did not take because another one was there.
    """

    granted: Scalar
    permanent: Scalar
    retryable: Scalar
    internal_error: Scalar
    grown: Scalar
    grown_permanent: Scalar
    grown_retryable: Scalar
    grown_internal_error: Scalar
    entered: Scalar
    cached_peak: Scalar
    duplicates: Scalar

    def answered(self, status: Scalar, admission: Scalar, growth: Scalar) -> RunTotals:
        """Counts an allocation's answer."""
        counted = list(self)
        for place, verdict in enumerate(VERDICTS):
            same = status == int(verdict)
            counted[place] = counted[place] + (admission & same)
            counted[place + len(VERDICTS)] = counted[place + len(VERDICTS)] + (growth & same)
        return RunTotals(*counted)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RtpResident(ScheduleResident):
    """A replay between two dispatches; donated.

    Attributes:
      cache: the cache.
      history: int32[keys + 1, 2], what became of each key, the last one spare: `INSERTED` and a bit for each group in
        which a block was entered; requests with blocks that have it.
      totals: int32[11], `RunTotals`.
    """

    cache: PooledState
    history: jax.Array
    totals: jax.Array


OWN_ARRAYS = ("history", *SCHEDULE_ARRAYS)
"""Names of the arrays of `RtpResident` that loops carry and that are not the cache's."""


def begin(cache: PooledState, requests: int, steps: int) -> RtpResident:
    """A replay in which nothing happened, as NumPy arrays."""
    buckets = cache.buckets
    arrays = empty_arrays(buckets.requests, buckets.requests + SPARE, buckets.groups, requests, steps)
    history = np.zeros((buckets.keys + 1, HISTORY), np.int32)
    return RtpResident(cache=cache, history=history, totals=np.zeros(len(RunTotals._fields), np.int32), **arrays)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class RtpScheduleWorkspace(PooledWorkspace, ScheduleArrays):
    """A `PooledWorkspace` with the arrays of a schedule, and what became of each key."""

    CARRIED = (*PooledWorkspace.CARRIED, *OWN_ARRAYS)
    EVERYTHING = (*ARRAYS, *OUTPUTS, "num_ids", *OWN_ARRAYS)
    """Arrays that one trip of a replay may write."""

    history: jax.Array

    def past(self, key: Scalar) -> Scalar:
        """Index into `history` of a key's bits."""
        return key * HISTORY

    def users(self, key: Scalar) -> Scalar:
        """Index into `history` of the requests that have a key."""
        return key * HISTORY + 1

    @property
    def spare_key(self) -> int:
        """A key that nothing has."""
        return self.sizes.buckets.keys


def group_bit(group: Scalar) -> Scalar:
    """The bit of a key's history that says that a block of this group was entered."""
    return jnp.left_shift(jnp.int32(2 * INSERTED), group)


NOTHING_CODE, HAD_CODE, GONE, SKIPPED, UNSHARED, OFF = map(
    REASONS.index, (NOTHING, HAD, EVICTED, RETIRED, NOT_SHARED, CACHING_OFF)
)

Work = RtpScheduleWorkspace


def use(work: Work, view: RtpView, trace: Trace, request: Scalar, change: Scalar) -> Work:
    """Notes that a request got blocks, or gave them back: `change` 1, -1, or 0 for nothing to do."""
    length = trace.request(request, Arriving.PROMPT) + trace.request(request, Arriving.OUTPUT)
    start = trace.request(request, Arriving.KEY_START)
    end = jnp.where(change != 0, divide(length, view.whole(CacheField.BLOCK)), -1)

    def body(w: Work, local: tuple[Scalar, ...]) -> tuple[Work, tuple[Scalar, ...]]:
        place, key, users = local
        w = w.write("history", users + change, w.users(key))
        inside = place < end
        key = jnp.where(inside, read(trace.keys, start + jnp.where(inside, place, 0)), w.spare_key)
        return w, (place + 1, key, w.read("history", w.users(key)))

    return loop(lambda c: c[0] <= end, body, work, (0, work.spare_key, 0), writes=("history",))[0]


def enter(work: Work, view: RtpView, slot: Scalar, keys: Scalar, enabled: Scalar) -> tuple[Work, tuple[Scalar, Scalar]]:
    """Notes what entering a request's whole blocks will change; asked right before.

    Returns:
      The workspace, how many blocks the cache will take, and how many it will not because another one is there.
    """
    groups = view.num_groups
    names = ("rows", "chains", "requests", "items", "history")

    def one(w: Work, local: tuple[Scalar, ...]) -> tuple[Work, tuple[Scalar, ...]]:
        position, taken, twice = local
        w, (key,) = peek(
            position >= 0, lambda v: (v.read("chains", v.chain(slot, 0) + position),), w, ("chains",), (0,)
        )

        def look(v: Work, at: tuple[Scalar, ...]) -> tuple[Work, tuple[Scalar, ...]]:
            group, bits, new, other = at
            inside = position < v.read("requests", v.length(slot, 0, group))
            block = v.read("rows", v.row(slot, 0, group) + jnp.where(inside, position, 0))
            mine = inside & (block != 0)
            cached = v.read("items", v.cached(key, group))
            new = new + (mine & (cached == 0) & view.flag(group, GroupField.REUSE))
            other = other + (mine & (cached != 0) & (cached != block))
            return v, (group + 1, bits | jnp.where(mine, group_bit(group), 0), new, other)

        start = (0, INSERTED, taken, twice)
        w, (_, bits, taken, twice) = loop(lambda c: c[0] < groups, look, w, start, reads=("rows", "requests", "items"))
        w, (past,) = peek(position >= 0, lambda v: (v.read("history", v.past(key)),), w, ("history",), (0,))
        return w.write("history", past | bits, w.past(key)), (position + 1, taken, twice)

    end = jnp.where(enabled, keys, 0)
    work, (_, taken, twice) = loop(lambda c: c[0] < end, one, work, (0, 0, 0), writes=names)
    return work, (taken, twice)


def diagnose(work: Work, view: RtpView, trace: Trace, request: Scalar, enabled: Scalar) -> Work:
    """Records how far a request's blocks were computed, and what is missing from each group there."""
    names = ("items", "history", "request_results")
    caching, size = trace.number(Number.CACHING) != 0, view.whole(CacheField.BLOCK)
    asked = jnp.where(caching, divide(trace.request(request, Arriving.ASKED), size), 0)
    start = trace.request(request, Arriving.KEY_START)

    def key(place: Scalar) -> Scalar:
        inside = (place >= 0) & (place < asked)
        return read(trace.keys, start + jnp.where(inside, place, 0))

    def body(w: Work) -> Work:
        def forward(v: Work, local: tuple[Scalar, Scalar]) -> tuple[Work, tuple[Scalar, Scalar]]:
            entered = (v.read("history", v.past(key(local[0]))) & INSERTED) != 0
            return v, (local[0] + entered, entered)

        w, (computed, _) = loop(lambda c: (c[0] < asked) & c[1], forward, w, (0, True), writes=("history",))

        def name(v: Work, local: tuple[Scalar]) -> tuple[Work, tuple[Scalar]]:
            (group,) = local
            full = view.flag(group, GroupField.FULL)

            def has(u: Work, at: tuple[Scalar, Scalar]) -> tuple[Work, tuple[Scalar, Scalar]]:
                there = u.read("items", u.cached(key(at[0]), group)) != 0
                return u, (at[0] + there, there & (at[0] + 1 < computed))

            first = jnp.where(full, 0, jnp.maximum(computed - 1, 0))
            v, (place, _) = loop(lambda c: c[1], has, v, (first, computed > 0), reads=("items",))
            v, (past,) = peek(group >= 0, lambda u: (u.read("history", u.past(key(place))),), v, ("history",), (0,))
            reason = jnp.where((past & group_bit(group)) != 0, GONE, SKIPPED)
            reason = jnp.where(place >= computed, HAD_CODE, reason)
            reason = jnp.where(computed == 0, NOTHING_CODE, reason)
            shared = full | view.flag(group, GroupField.VOTES)
            reason = jnp.where(caching, jnp.where(shared, reason, UNSHARED), OFF)
            return v.write("request_results", reason, v.request_result(request, RESULT_COLUMNS + group)), (group + 1,)

        w, _ = loop(lambda c: c[0] < view.num_groups, name, w, (0,), writes=names)
        return w.write("request_results", computed * size, w.computed(request))

    return when(enabled, body, work, writes=names)

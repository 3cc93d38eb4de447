"""State of a compiled replay under RTP-LLM's rules on the device."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hkv.replay.schedule_state import SCHEDULE_ARRAYS, ScheduleArrays, ScheduleResident, empty_arrays
from hkv.state.loops import Scalar
from hkv.state.pooled import SPARE, PooledState
from hkv.state.pooled_workspace import ARRAYS, OUTPUTS, PooledWorkspace
from hkv.state.status import Status

VERDICTS = (Status.OK, Status.NO_ROOM_FOR_SEQUENCE, Status.NO_ROOM, Status.NOT_EVICTABLE)
"""Statuses with which an allocation may end in a replay."""

INSERTED = 1
"""The bit of a key's history that says that some request entered it; the next ones say in which groups."""

HISTORY = 2
"""Words of a key's history: the bits, and how many requests that hold blocks have the key."""


class Tally(NamedTuple):
    """Counts of a replay, as scalars.

    Attributes:
      granted, permanent, retryable, internal_error: verdicts on admissions, in the order of `VERDICTS`.
      grown, grown_permanent, grown_retryable, grown_internal_error: likewise to growing requests.
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

    def answered(self, status: Scalar, admission: Scalar, growth: Scalar) -> Tally:
        """Counts an allocation's answer."""
        counted = list(self)
        for place, verdict in enumerate(VERDICTS):
            same = status == int(verdict)
            counted[place] = counted[place] + (admission & same)
            counted[place + len(VERDICTS)] = counted[place + len(VERDICTS)] + (growth & same)
        return Tally(*counted)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RtpResident(ScheduleResident):
    """A replay between two dispatches; donated.

    Attributes:
      cache: the cache.
      history: int32[keys + 1, 2], what became of each key, the last one spare: `INSERTED` and a bit for each group in
        which a block was entered; requests with blocks that have it.
      tally: int32[11], `Tally`.
    """

    cache: PooledState
    history: jax.Array
    tally: jax.Array


OWN_ARRAYS = ("history", *SCHEDULE_ARRAYS)
"""Names of the arrays of `RtpResident` that loops carry and that are not the cache's."""

EVERYTHING = (*ARRAYS, *OUTPUTS, "num_ids", *OWN_ARRAYS)
"""Arrays that one trip of a replay may write."""


def begin(cache: PooledState, requests: int, steps: int) -> RtpResident:
    """A replay in which nothing happened, as NumPy arrays.

    Args:
      cache: an empty cache with at least two request slots.
      requests: bucket for the requests of the trace.
      steps: most steps of one dispatch.
    """
    buckets = cache.buckets
    arrays = empty_arrays(buckets.requests, buckets.requests + SPARE, buckets.groups, requests, steps)
    history = np.zeros((buckets.keys + 1, HISTORY), np.int32)
    return RtpResident(cache=cache, history=history, tally=np.zeros(len(Tally._fields), np.int32), **arrays)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class RtpScheduleWorkspace(PooledWorkspace, ScheduleArrays):
    """A `PooledWorkspace` with the arrays of a schedule, and what became of each key."""

    CARRIED = (*PooledWorkspace.CARRIED, *OWN_ARRAYS)

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

"""State of a compiled replay on the device: the cache, the requests on their way, the outcome of each."""

from __future__ import annotations

import dataclasses

import jax

from hkv.replay.schedule_state import (
    SCHEDULE_ARRAYS,
    ScheduleArrays,
    ScheduleResident,
    Trace,
    empty_arrays,
)
from hkv.state.state import State
from hkv.state.workspace import ARRAYS, COUNTERS, OUTPUTS, Workspace


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


EVERYTHING = (*ARRAYS, *OUTPUTS, *COUNTERS, "num_ids", "num_events", "num_copies", *SCHEDULE_ARRAYS)
"""Arrays that one trip of a replay may write."""


def begin(cache: State, requests: int, steps: int) -> Resident:
    """A replay in which nothing happened, as NumPy arrays.

    Args:
      cache: an empty cache with at least two request slots.
      requests: bucket for the requests of the trace.
      steps: most steps of one dispatch.
    """
    slots, groups = cache.rows.shape[0] - 1, cache.rows.shape[1]
    return Resident(cache=cache, **empty_arrays(slots, slots, groups, requests, steps))


@dataclasses.dataclass(frozen=True)
class ScheduleWorkspace(Workspace, ScheduleArrays):
    """A `Workspace` with the arrays of a schedule."""

    CARRIED = (*Workspace.CARRIED, *SCHEDULE_ARRAYS)

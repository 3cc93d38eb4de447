"""Tokens that a running request can grow by before the cache has anything to do for it."""

from __future__ import annotations

import jax.numpy as jnp

from hkv.dialects.vllm.rules import admit
from hkv.dialects.vllm.rules.parameters import CacheField, GroupField, View
from hkv.dialects.vllm.schedule.compiled_state import ScheduleWorkspace
from hkv.replay.schedule_state import Number, Seat, Trace
from hkv.state.loops import Scalar, divide, loop, when
from hkv.state.state import Row

UNLIMITED = (1 << 30) - 1
"""More tokens than any request has."""


def note(
    work: ScheduleWorkspace, view: View, trace: Trace, slot: Scalar, main: Scalar, enabled: Scalar
) -> ScheduleWorkspace:
    """Notes up to how many tokens an allocation for a request would take, register and give back nothing.

    In every group: no block beyond those of its row, no further block filled, none that the next query cannot read.
    What is noted may be too little, never too much: an allocation that changes nothing is no mistake.

    Args:
      work: needs `requests` and `seats` to write; `requests` only to its spare element.
      view: the configuration.
      trace: the schedule's numbers.
      slot: a request that was just granted blocks.
      main: tokens it has blocks for, lookahead ones not counted.
      enabled: whether to do it.
    """

    def group_bound(w: ScheduleWorkspace, local: tuple[Scalar, ...]) -> tuple[ScheduleWorkspace, tuple[Scalar, ...]]:
        group, bound = local
        length, first, cached = w.get_row(slot, group, Row.LENGTH, Row.FIRST, Row.CACHED)
        bound = jnp.minimum(bound, _unchanged(view, trace, group, length, cached))
        w, bound = _unretired(w, view, group, first, main, bound)
        return w, (group + 1, bound)

    def body(w: ScheduleWorkspace) -> ScheduleWorkspace:
        w, (_, bound) = loop(
            lambda c: c[0] < view.num_groups, group_bound, w, (0, view.whole(CacheField.MAX_MODEL_LEN)), ("requests",)
        )
        return w.write("seats", bound, w.seat(slot, Seat.CALM))

    return when(enabled, body, work, reads=("requests",), writes=("seats",))


def _unchanged(view: View, trace: Trace, group: Scalar, length: Scalar, cached: Scalar) -> Scalar:
    """Tokens up to which a group needs no block and fills none."""
    block = view.group(group, GroupField.BLOCK)
    ahead = jnp.where(view.group(group, GroupField.RECURRENT) != 0, 0, trace.number(Number.LOOKAHEAD))
    room = length * block
    whole = (view.group(group, GroupField.ONE_BLOCK) != 0) | (room >= view.whole(CacheField.MAX_MODEL_LEN))
    room = jnp.where(whole, UNLIMITED, room - ahead)
    unfilled = jnp.where(view.group(group, GroupField.TAIL) != 0, 0, (cached + 1) * block - 1)
    return jnp.where(view.group(group, GroupField.CACHEABLE) != 0, jnp.minimum(room, unfilled), room)


def _unretired(
    work: ScheduleWorkspace, view: View, group: Scalar, first: Scalar, main: Scalar, bound: Scalar
) -> tuple[ScheduleWorkspace, Scalar]:
    """The largest number of tokens from `main` to `bound` before which the query gives no block back, by bisection."""

    def body(w: ScheduleWorkspace, local: tuple[Scalar, Scalar]) -> tuple[ScheduleWorkspace, tuple[Scalar, Scalar]]:
        low, high = local
        middle = divide(low + high + 1, jnp.int32(2))
        kept = admit.skipped_blocks(view, group, middle - 1) <= first
        return w, (jnp.where(kept, middle, low), jnp.where(kept, high, middle - 1))

    work, (low, _) = loop(lambda c: c[0] < c[1], body, work, (main, bound))
    return work, jnp.where(bound > main, low, bound)

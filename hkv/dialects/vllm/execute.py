"""The program: operations in order, each a sequence of phases that run or do not, as its code says."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hkv.dialects.vllm import register, transitions
from hkv.dialects.vllm.parameters import Parameters, View
from hkv.dialects.vllm.transitions import Answer
from hkv.operations import RESULT_FRONT, Argument, Code, Column, Operations, Results
from hkv.state.events import WIDTH as EVENT_WIDTH
from hkv.state.loops import Scalar, loop, read, when
from hkv.state.state import State
from hkv.state.status import Status
from hkv.state.workspace import ARRAYS, COUNTERS, OUTPUTS, Workspace

EVERYTHING = (*ARRAYS, *OUTPUTS, *COUNTERS, "num_ids", "num_events")
"""What an operation may write."""


def execute(
    parameters: Parameters, state: State, operations: Operations, *, only: tuple[Code, ...], ids: int, events: int
) -> tuple[State, Results]:
    """Performs operations on one or more states, lane after lane.

    Args:
      parameters, state, operations: as `hkv.cache.run` takes them, with a leading axis of lanes.
      only: codes to know.
      ids: room for block ids.
      events: room for events.

    Returns:
      New states and results, with a leading axis of lanes.
    """
    lanes = state.queue.shape[0]
    groups = state.table.shape[2]
    width = RESULT_FRONT + 2 * groups
    arrays = {name: getattr(state, name) for name in ARRAYS}
    outputs = {
        "ids": jnp.zeros((lanes, ids + 1), jnp.int32),
        "events": jnp.zeros((lanes, events + 1, EVENT_WIDTH), jnp.int32),
        "results": jnp.zeros((lanes, operations.table.shape[1] + 1, width), jnp.int32),
    }
    zero = jnp.int32(0)
    work = Workspace(**arrays, **outputs, lane=zero, num_ids=zero, num_events=zero, **dict.fromkeys(COUNTERS, zero))
    names = (*ARRAYS, *OUTPUTS)

    def one_lane(carry: tuple[Scalar, tuple[jax.Array, ...], jax.Array, jax.Array]) -> tuple[object, ...]:
        lane, values, counters, counts = carry
        start = {name: read(counters, lane, int(place)) for name, place in COUNTERS.items()}
        w = work.replace(**dict(zip(names, values, strict=True)), **start, lane=lane)
        w = _perform(w, View(parameters.cache, parameters.groups, lane), operations, only)
        line = jnp.zeros(counters.shape[1:], jnp.int32)
        for name, place in COUNTERS.items():
            line = line.at[int(place)].set(getattr(w, name))
        counters = jax.lax.dynamic_update_slice(counters, line[None], (lane, zero))
        counts = jax.lax.dynamic_update_slice(counts, jnp.stack([w.num_ids, w.num_events])[None], (lane, zero))
        return lane + 1, tuple(getattr(w, name) for name in names), counters, counts

    carry = (zero, tuple(getattr(work, name) for name in names), state.counters, jnp.zeros((lanes, 2), jnp.int32))
    if lanes == 1:
        carry = one_lane(carry)
    else:
        carry = jax.lax.while_loop(lambda c: c[0] < lanes, one_lane, carry)
    _, values, counters, counts = carry
    out = dict(zip(names, values, strict=True))
    results = Results(table=out["results"][:, :-1], ids=out["ids"][:, :-1], events=out["events"][:, :-1], counts=counts)
    return State(**{name: out[name] for name in ARRAYS}, counters=counters), results


def _perform(work: Workspace, view: View, operations: Operations, only: tuple[Code, ...]) -> Workspace:
    size = operations.table.shape[1]

    def code_at(place: Scalar) -> Scalar:
        inside = place < size
        code = read(operations.table, work.lane, jnp.where(inside, place, 0), int(Argument.CODE))
        return jnp.where(inside, code, int(Code.END))

    def body(w: Workspace, local: tuple[Scalar, Scalar]) -> tuple[Workspace, tuple[Scalar, Scalar]]:
        place, code = local
        w = _one(w, view, operations, place, code, only)
        return w, (place + 1, code_at(place + 1))

    start = (jnp.int32(0), code_at(jnp.int32(0)))
    return loop(lambda c: c[1] != int(Code.END), body, work, start, writes=EVERYTHING)[0]


def _one(
    w: Workspace, view: View, operations: Operations, place: Scalar, code: Scalar, only: tuple[Code, ...]
) -> Workspace:
    w, op = transitions.fetch(w, operations.table, place, code)
    known = jnp.bool_(False)
    for each in only:
        known = known | (code == int(each))
    nowhere = known & transitions.needs_slot(code) & ~op.exists
    status = jnp.where(known, int(Status.OK), int(Status.UNKNOWN_OPERATION))
    answer = Answer(
        status=jnp.where(nowhere, int(Status.NO_SUCH_SLOT), status),
        value=jnp.int32(0),
        shared_prefix=jnp.int32(0),
        reported=jnp.bool_(False),
    )
    w = w.replace(dropped=w.dropped + nowhere)
    first_id = w.num_ids
    certain = jnp.int32(-1)
    if Code.REQUEST in only or Code.APPEND in only:
        w, answer = transitions.arrive(w, view, op, answer, operations.payload)
    if Code.LOOKUP in only:
        w, answer = transitions.lookup(w, view, op, answer)
    if Code.ALLOCATE in only:
        w, answer, certain = transitions.allocate(w, view, op, answer)
    if Code.COMMIT in only:
        answer, certain = transitions.commit(op, answer, certain)
    if Code.ALLOCATE in only or Code.COMMIT in only:
        w = when(
            certain >= 0,
            lambda v: register.register(v, view, op.slot, certain, certain >= 0),
            w,
            writes=register.WRITES,
        )
    if Code.ADVANCE in only:
        w, answer = transitions.advance(w, op, answer)
    if Code.RETIRE in only:
        w, answer = transitions.retire(w, view, op, answer)
    if Code.FREE in only or Code.DROP in only:
        w, answer = transitions.leave(w, view, op, answer)
    if Code.EVICT in only:
        w, answer = transitions.evict(w, view, op, answer, operations.payload)
    if Code.STEP in only:
        w = transitions.step(w, op, answer)
    if Code.RESET in only:
        w, answer = transitions.reset(w, view, op, answer)
    for column, value in zip(Column, (answer.status, answer.value, answer.shared_prefix, first_id), strict=True):
        w = w.write("results", value, place, int(column))
    w = w.replace(clock=w.clock + transitions.may_change_hits(code))
    if Code.LOOKUP in only or Code.ALLOCATE in only:
        w = transitions.report(w, view, op, answer, place)
    return w

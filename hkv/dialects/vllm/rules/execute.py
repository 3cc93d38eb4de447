"""The program: operations in order, each a sequence of phases that run or do not, as its code says.

An engine calls methods of `KVCacheManager` one after the other. Here they are rows of a table, and one loop performs
them: a dispatch for thousands of operations. A `switch` over codes would copy every array that its branches change, so
that all phases stand one behind the other, each in a loop of at most one trip. Phases of codes that a batch does not
have are not compiled (`only`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from hkv.dialects.vllm.rules import fork, live, noop, transitions
from hkv.dialects.vllm.rules.operations import RESULT_FRONT, Argument, Code, Column, Results
from hkv.dialects.vllm.rules.parameters import Parameters, View
from hkv.dialects.vllm.rules.transitions import Answer
from hkv.machine.operations import Operations, Payload, perform_all
from hkv.state import free_queue
from hkv.state.loops import Scalar, loop
from hkv.state.state import State
from hkv.state.status import Status
from hkv.state.workspace import ARRAYS, COUNTERS, EVENT_WORDS, OUTPUTS, Sizes, Workspace

EVERYTHING = (*ARRAYS, *OUTPUTS, *COUNTERS, "num_ids", "num_events", "num_copies")
"""Arrays that an operation may write."""


def execute(
    parameters: Parameters, state: State, operations: Operations, *, only: tuple[Code, ...], ids: int, events: int
) -> tuple[State, Results]:
    """Performs operations with codes `only` on one or more states, lane after lane; every argument and result has a
    leading axis of lanes.

    `ids` and `events` are room for block ids and for events.
    """
    lanes, places = operations.table.shape[:2]
    buckets = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state).buckets
    width = RESULT_FRONT + 2 * buckets.groups
    sizes = Sizes(buckets, lanes, places, width, ids, events)
    arrays = {name: getattr(state, name).reshape(-1) for name in ARRAYS}
    outputs = {
        "ids": jnp.zeros(lanes * (ids + 1), jnp.int32),
        "events": jnp.zeros(lanes * (events + 1) * EVENT_WORDS, jnp.int32),
        "copies": jnp.zeros(0, jnp.int32),
        "results": jnp.zeros(lanes * (places + 1) * width, jnp.int32),
    }
    zero = jnp.int32(0)
    scalars = dict.fromkeys(("lane", *COUNTERS, "num_ids", "num_events", "num_copies"), zero)
    fields: dict[str, Any] = {**arrays, **outputs, **scalars}
    work = Workspace(sizes, **fields)
    names = work.present((*ARRAYS, *OUTPUTS))
    flat = jax.tree.map(lambda x: x.reshape(-1), (parameters, operations))

    def one_lane(carry: tuple[Scalar, tuple[jax.Array, ...], jax.Array, jax.Array]) -> tuple[Any, ...]:
        lane, values, counters, counts = carry
        # Counters are scalars while a lane's operations run, and go back into the array once, at the end.
        line = jax.lax.dynamic_index_in_dim(counters, lane, keepdims=False)
        start = {name: line[int(place)] for name, place in COUNTERS.items()}
        w = work.replace(**dict(zip(names, values, strict=True)), **start, lane=lane)
        view = View(flat[0].cache, flat[0].groups, None if lanes == 1 else lane, buckets.groups)
        w = _perform(w, view, flat[1], only)
        for name, place in COUNTERS.items():
            line = line.at[int(place)].set(getattr(w, name))
        counters = jax.lax.dynamic_update_slice(counters, line[None], (lane, zero))
        counts = jax.lax.dynamic_update_slice(counts, jnp.stack([w.num_ids, w.num_events])[None], (lane, zero))
        return lane + 1, tuple(getattr(w, name) for name in names), counters, counts

    carry = (zero, tuple(getattr(work, name) for name in names), state.counters, jnp.zeros((lanes, 2), jnp.int32))
    if lanes == 1:
        # Without the loop over lanes, XLA sees indices without a lane's offset (`FlatArrays._base`).
        carry = one_lane(carry)
    else:
        carry = jax.lax.while_loop(lambda c: c[0] < lanes, one_lane, carry)
    _, values, counters, counts = carry
    out = {**outputs, **dict(zip(names, values, strict=True))}
    new = State(**{name: out[name].reshape(getattr(state, name).shape) for name in ARRAYS}, counters=counters)
    results = Results(
        table=out["results"].reshape(lanes, places + 1, width)[:, :-1],
        ids=out["ids"].reshape(lanes, ids + 1)[:, :-1],
        events=out["events"].reshape(lanes, events + 1, EVENT_WORDS)[:, :-1],
        counts=counts,
    )
    return new, results


_GIVING = {Code.ALLOCATE, Code.RETIRE, Code.FREE, Code.COPIES}
"""Operations that may put blocks back into the queue."""


def _perform(work: Workspace, view: View, operations: Operations, only: tuple[Code, ...]) -> Workspace:
    def one(w: Workspace, row: Scalar, place: Scalar, code: Scalar, payload: Payload) -> Workspace:
        # `only` names the operations of a batch: rules of others are not compiled, which is most of the time that
        # compiling takes.
        if _GIVING.intersection(only):
            w = free_queue.make_room(w)
        w, op = transitions.fetch(w, operations.table, row, code)
        return _one(w, view, op, payload, place, only)

    table, payload = operations.table, operations.payload
    return perform_all(work, table, payload, Argument.CODE, int(Code.END), one, EVERYTHING)


_SELDOM = {Code.REQUEST, Code.APPEND, Code.EVICT, Code.RESET, Code.COPIES, Code.FORK, Code.POP, Code.FOUND}
"""Operations that are rare compared with the tokens of a request: the others pass them by in one jump."""


def _seldom(
    work: Workspace,
    view: View,
    op: transitions.Op,
    answer: Answer,
    payload: Payload,
    place: Scalar,
    only: tuple[Code, ...],
) -> tuple[Workspace, Answer]:
    def perform(w: Workspace, local: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
        got = Answer(*local[1:])
        if Code.REQUEST in only or Code.APPEND in only:
            w, got = transitions.arrive(w, view, op, got, payload)
        if Code.EVICT in only:
            w, got = transitions.evict(w, view, op, got, payload)
        if Code.COPIES in only:
            w, got = live.made_copies(w, op, got, payload)
        if Code.RESET in only:
            w, got = transitions.reset(w, view, op, got)
        if Code.FORK in only:
            w, got = fork.fork(w, view, op, got, place)
        if Code.POP in only:
            w, got = live.pop(w, view, op, got)
        if Code.FOUND in only:
            w, got = live.found(w, view, op, got, payload)
        return w, (False, *got)

    # A loop of at most one trip, not a branch: one jump for most operations, and no array is copied
    # (`hkv.state.loops`).
    mine = _one_of(op.code, _SELDOM.intersection(only))
    work, local = loop(lambda c: c[0], perform, work, (mine, *answer), writes=EVERYTHING)
    return work, Answer(*local[1:])


_ABOUT_BLOCKS = {Code.ALLOCATE, Code.COMMIT, Code.RETIRE, Code.FREE}
"""Operations that take, register or give back blocks; of these, the first two may take or register."""


def _blocks(
    work: Workspace, view: View, op: transitions.Op, answer: Answer, only: tuple[Code, ...]
) -> tuple[Workspace, Answer]:
    def perform(w: Workspace, local: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
        got = Answer(*local[1:])
        plan = None
        if not only_commits:
            w, got, plan = transitions.admit_or_give_back(w, view, op, got, Code.ALLOCATE in only)
        if Code.ALLOCATE in only or Code.COMMIT in only:
            w, got = _granted(w, view, op, got, plan, only)
        return w, (False, *got)

    only_commits = not {Code.ALLOCATE, Code.RETIRE, Code.FREE}.intersection(only)
    mine = _one_of(op.code, _ABOUT_BLOCKS.intersection(only))
    work, local = loop(lambda c: c[0], perform, work, (mine, *answer), writes=EVERYTHING)
    return work, Answer(*local[1:])


def _granted(
    work: Workspace,
    view: View,
    op: transitions.Op,
    answer: Answer,
    plan: transitions.AllocationPlan | None,
    only: tuple[Code, ...],
) -> tuple[Workspace, Answer]:
    """Second part of ALLOCATE, once blocks are granted, and COMMIT."""

    def perform(w: Workspace, local: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
        got, certain = Answer(*local[1:]), jnp.int32(-1)
        if plan is not None and Code.ALLOCATE in only:
            w, got, certain = transitions.allocate(w, view, op, got, plan)
        if Code.COMMIT in only:
            got, certain = transitions.commit(op, got, certain)
        w, got = transitions.register(w, view, op, got, certain)
        if plan is not None and Code.ALLOCATE in only:
            w = noop.note(w, view, op.slot, plan.granted & ~plan.is_noop)
        return w, (False, *got)

    mine = op.code == int(Code.COMMIT)
    if plan is not None:
        mine = mine | plan.granted
    work, local = loop(lambda c: c[0], perform, work, (mine, *answer), writes=EVERYTHING)
    return work, Answer(*local[1:])


def _one_of(code: Scalar, codes: Iterable[Code]) -> Scalar:
    found = jnp.bool_(False)
    for each in sorted(codes):
        found = found | (code == int(each))
    return found


def _one(
    w: Workspace, view: View, op: transitions.Op, payload: Payload, place: Scalar, only: tuple[Code, ...]
) -> Workspace:
    code = op.code
    known = _one_of(code, only)
    # An operation about a slot that does not exist works on the spare slot: nothing of it counts, and nobody is
    # harmed.
    nowhere = known & transitions.needs_slot(code) & ~op.exists
    status = jnp.where(known, int(Status.OK), int(Status.UNKNOWN_OPERATION))
    answer = Answer(
        status=jnp.where(nowhere, int(Status.NO_SUCH_SLOT), status),
        value=jnp.int32(0),
        shared_prefix=jnp.int32(0),
        reported=jnp.bool_(False),
        copies=jnp.int32(0),
    )
    w = w.replace(dropped=w.dropped + nowhere)
    first_id = w.num_ids
    if _SELDOM.intersection(only):
        w, answer = _seldom(w, view, op, answer, payload, place, only)
    if Code.LOOKUP in only:
        w, answer = transitions.lookup(w, view, op, answer)
    if _ABOUT_BLOCKS.intersection(only):
        w, answer = _blocks(w, view, op, answer, only)
    if Code.ADVANCE in only:
        w, answer = transitions.advance(w, op, answer)
    if Code.COMPUTED in only:
        w, answer = live.computed(w, op, answer)
    if {Code.FREE, Code.DROP, Code.POP}.intersection(only):
        w, answer = transitions.leave(w, op, answer)
    if Code.STEP in only:
        w = transitions.step(w, op, answer)
    for column, value in zip(
        Column, (answer.status, answer.value, answer.shared_prefix, first_id, answer.copies), strict=True
    ):
        w = w.write("results", value, w.result(place, int(column)))
    # After the operation: an ALLOCATE right behind its own LOOKUP finds the clock as it was.
    w = w.replace(clock=w.clock + transitions.may_change_hits(code))
    if Code.LOOKUP in only or Code.ALLOCATE in only:
        w = transitions.report(w, view, op, answer, place)
    return w

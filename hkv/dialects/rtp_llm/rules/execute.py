"""The program: operations in order, each a sequence of phases that run or do not, as its code says.

A phase is a loop of at most one trip, since a `switch` over codes would copy every array that its branches change
(`hkv.state.loops`). Phases of codes that a batch does not have are not compiled (`only`), which is most of the time
that compiling takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hkv.dialects.rtp_llm.rules import transitions
from hkv.dialects.rtp_llm.rules.operations import COLUMNS, RtpArgument, RtpCode, RtpColumn, RtpResults
from hkv.dialects.rtp_llm.rules.parameters import RtpParameters, RtpView
from hkv.dialects.rtp_llm.rules.transitions import RtpAnswer, RtpOp
from hkv.machine.operations import Operations, Payload, perform_all
from hkv.state.loops import Scalar, loop
from hkv.state.pooled import PooledState
from hkv.state.pooled_workspace import ARRAYS, OUTPUTS, PooledSizes, PooledWorkspace
from hkv.state.status import Status

EVERYTHING = (*ARRAYS, *OUTPUTS, "num_ids")
"""Arrays that an operation may write."""


def execute(
    parameters: RtpParameters, state: PooledState, operations: Operations, *, only: tuple[RtpCode, ...], ids: int
) -> tuple[PooledState, RtpResults]:
    """Performs operations with codes `only` on one or more states, lane after lane; every argument and result has a
    leading axis of lanes.

    `ids` is room for ids.
    """
    lanes, places = operations.table.shape[:2]
    buckets = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state).buckets
    outputs = {
        "ids": jnp.zeros(lanes * (ids + 1), jnp.int32),
        "results": jnp.zeros(lanes * (places + 1) * COLUMNS, jnp.int32),
    }
    zero = jnp.int32(0)
    fields: dict[str, Any] = {name: getattr(state, name).reshape(-1) for name in ARRAYS}
    sizes = PooledSizes(buckets, lanes, places, COLUMNS, ids)
    work = PooledWorkspace(sizes, **fields, **outputs, lane=zero, num_ids=zero)
    names = work.present((*ARRAYS, *OUTPUTS))
    flat = jax.tree.map(lambda x: x.reshape(-1), (parameters, operations))

    def one_lane(carry: tuple[Scalar, tuple[jax.Array, ...], jax.Array]) -> tuple[Any, ...]:
        lane, values, counts = carry
        w = work.replace(**dict(zip(names, values, strict=True)), lane=lane)
        view = RtpView(flat[0].cache, flat[0].groups, None if lanes == 1 else lane, buckets.groups)
        w = _perform(w, view, flat[1], only)
        counts = jax.lax.dynamic_update_slice(counts, jnp.asarray(w.num_ids)[None], (lane,))
        return lane + 1, tuple(getattr(w, name) for name in names), counts

    carry = (zero, tuple(getattr(work, name) for name in names), jnp.zeros(lanes, jnp.int32))
    if lanes == 1:
        # Without the loop over lanes, XLA sees indices without a lane's offset (`FlatArrays._base`).
        carry = one_lane(carry)
    else:
        carry = jax.lax.while_loop(lambda c: c[0] < lanes, one_lane, carry)
    _, values, counts = carry
    out = {**fields, **outputs, **dict(zip(names, values, strict=True))}
    new = PooledState(**{name: out[name].reshape(getattr(state, name).shape) for name in ARRAYS})
    results = RtpResults(
        table=out["results"].reshape(lanes, places + 1, COLUMNS)[:, :-1],
        ids=out["ids"].reshape(lanes, ids + 1)[:, :-1],
        count=counts,
    )
    return new, results


def _perform(
    work: PooledWorkspace, view: RtpView, operations: Operations, only: tuple[RtpCode, ...]
) -> PooledWorkspace:
    def one(w: PooledWorkspace, row: Scalar, place: Scalar, code: Scalar, payload: Payload) -> PooledWorkspace:
        w, op = transitions.fetch(w, view, operations.table, row, code)
        return _one(w, view, op, payload, place, only)

    table, payload = operations.table, operations.payload
    return perform_all(work, table, payload, RtpArgument.CODE, int(RtpCode.END), one, EVERYTHING)


Phase = Callable[[PooledWorkspace, RtpView, RtpOp, RtpAnswer, Payload], tuple[PooledWorkspace, RtpAnswer]]


def _phases(only: tuple[RtpCode, ...]) -> list[tuple[tuple[RtpCode, ...], Phase]]:
    """Phases of an operation, and the codes of those that each is for."""
    code = RtpCode
    phases: list[tuple[tuple[RtpCode, ...], Phase]] = [
        ((code.REQUEST, code.APPEND), transitions.arrive),
        ((code.MALLOC, code.FREE), lambda w, view, op, answer, _: transitions.allocate(w, view, op, answer, only)),
        ((code.INSERT,), lambda w, view, op, answer, _: transitions.enter(w, view, op, answer)),
        ((code.FORK,), transitions.split),
        ((code.DROP,), lambda w, view, op, answer, _: transitions.leave(w, op, answer)),
        ((code.HOLD,), lambda w, view, op, answer, _: transitions.hold(w, view, op, answer)),
        ((code.RELEASE,), transitions.release),
        ((code.EXPORT, code.EVICT), lambda w, view, op, answer, _: transitions.export(w, view, op, answer)),
        ((code.PEAK,), lambda w, view, op, answer, _: transitions.estimate(w, view, op, answer)),
    ]
    return [(codes, phase) for codes, phase in phases if set(codes).intersection(only)]


def _one(
    w: PooledWorkspace, view: RtpView, op: RtpOp, payload: Payload, place: Scalar, only: tuple[RtpCode, ...]
) -> PooledWorkspace:
    known = _is_any(op.code, only)
    nowhere = known & ~_is_any(op.code, transitions.SLOTLESS) & ~op.exists
    absent = transitions.needs_request(op.code) & (op.live == 0)
    status = jnp.where(known, int(Status.OK), int(Status.UNKNOWN_OPERATION))
    status = jnp.where(nowhere | (known & absent), int(Status.NO_SUCH_SLOT), status)
    answer = RtpAnswer(status, jnp.int32(0), jnp.int32(0))
    w = transitions.count_dropped(w, nowhere.astype(jnp.int32))
    first_id = w.num_ids
    for codes, phase in _phases(only):

        def run(
            v: PooledWorkspace, local: tuple[Scalar, ...], phase: Phase = phase
        ) -> tuple[PooledWorkspace, tuple[Scalar, ...]]:
            v, got = phase(v, view, op, RtpAnswer(*local[1:]), payload)
            return v, (False, *got)

        mine = answer.ok & _is_any(op.code, codes)
        w, local = loop(lambda c: c[0], run, w, (mine, *answer), writes=EVERYTHING)
        answer = RtpAnswer(*local[1:])
    for column, value in (
        (RtpColumn.STATUS, answer.status),
        (RtpColumn.VALUE, answer.value),
        (RtpColumn.IDS, first_id),
        (RtpColumn.COUNT, answer.count),
    ):
        w = w.write("results", value, w.result(place, int(column)))
    return w


def _is_any(code: Scalar, codes: tuple[RtpCode, ...]) -> Scalar:
    found = jnp.bool_(False)
    for each in codes:
        found = found | (code == int(each))
    return found

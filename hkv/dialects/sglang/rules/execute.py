"""The program: operations in order, each a sequence of phases that run or do not, as its code says.

A phase is a loop of at most one trip, since a `switch` over codes would copy every array that its branches change
(`hkv.state.loops`). Phases of codes that a batch does not have are not compiled (`only`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hkv.dialects.sglang.rules import entering, transitions
from hkv.dialects.sglang.rules.operations import COLUMNS, SGLangArgument, SGLangCode, SGLangColumn, SGLangResults
from hkv.dialects.sglang.rules.parameters import SGLangParameters, SGLangView
from hkv.dialects.sglang.rules.transitions import SLOTLESS, SGLangAnswer, SGLangOp
from hkv.machine.operations import Operations, Payload, perform_all
from hkv.state.loops import Scalar, loop
from hkv.state.radix import RadixState
from hkv.state.radix_workspace import ARRAYS, OUTPUTS, RadixSizes, RadixWorkspace
from hkv.state.status import Status

EVERYTHING = (*ARRAYS, *OUTPUTS)
"""Arrays that an operation may write."""


def execute(
    parameters: SGLangParameters, state: RadixState, operations: Operations, *, only: tuple[SGLangCode, ...]
) -> tuple[RadixState, SGLangResults]:
    """Performs operations with codes `only` on one or more states, lane after lane; every argument and result has a
    leading axis of lanes."""
    lanes, places = operations.table.shape[:2]
    buckets = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state).buckets
    fields: dict[str, Any] = {name: getattr(state, name).reshape(-1) for name in ARRAYS}
    fields["results"] = jnp.zeros(lanes * (places + 1) * COLUMNS, jnp.int32)
    work = RadixWorkspace(RadixSizes(buckets, lanes, places, COLUMNS), lane=jnp.int32(0), **fields)
    flat = jax.tree.map(lambda x: x.reshape(-1), (parameters, operations))

    def one_lane(carry: tuple[Scalar, tuple[jax.Array, ...]]) -> tuple[Any, ...]:
        lane, values = carry
        w = work.replace(**dict(zip(EVERYTHING, values, strict=True)), lane=lane)
        w = _perform(w, SGLangView(flat[0].cache, None if lanes == 1 else lane), flat[1], only)
        return lane + 1, tuple(getattr(w, name) for name in EVERYTHING)

    carry = (jnp.int32(0), tuple(getattr(work, name) for name in EVERYTHING))
    # Without the loop over lanes, XLA sees indices without a lane's offset (`FlatArrays._base`).
    carry = one_lane(carry) if lanes == 1 else jax.lax.while_loop(lambda c: c[0] < lanes, one_lane, carry)
    out = dict(zip(EVERYTHING, carry[1], strict=True))
    new = RadixState(**{name: out[name].reshape(getattr(state, name).shape) for name in ARRAYS})
    return new, SGLangResults(table=out["results"].reshape(lanes, places + 1, COLUMNS)[:, :-1])


def _perform(
    work: RadixWorkspace, view: SGLangView, operations: Operations, only: tuple[SGLangCode, ...]
) -> RadixWorkspace:
    def one(w: RadixWorkspace, row: Scalar, place: Scalar, code: Scalar, payload: Payload) -> RadixWorkspace:
        w, op = transitions.fetch(w, operations.table, row, code)
        return _one(w, view, op, payload, place, only)

    table, payload = operations.table, operations.payload
    return perform_all(work, table, payload, SGLangArgument.CODE, int(SGLangCode.END), one, EVERYTHING)


Phase = Callable[[RadixWorkspace, SGLangView, SGLangOp, SGLangAnswer, Payload], tuple[RadixWorkspace, SGLangAnswer]]


def phases_of(only: tuple[SGLangCode, ...]) -> list[tuple[tuple[SGLangCode, ...], Phase]]:
    """Phases of an operation, and the codes of those that each is for."""
    code = SGLangCode
    phases: list[tuple[tuple[SGLangCode, ...], Phase]] = [
        ((code.MATCH, code.ADMIT), transitions.arrive),
        ((code.DECODE,), transitions.note_token),
        (
            (code.ADMIT, code.EXTEND, code.DECODE, code.CHECKPOINT, code.EVICT, code.ROOM),
            _plain(transitions.make_room),
        ),
        ((code.EXTEND, code.DECODE), _plain(transitions.allocate)),
        ((code.SLIDE, code.RELEASE_WINDOW), _plain(transitions.pass_window)),
        ((code.CHECKPOINT, code.FINISH), _plain(entering.enter)),
        ((code.FINISH, code.ABORT), _plain(entering.leave)),
    ]
    return [(codes, phase) for codes, phase in phases if set(codes).intersection(only)]


def _plain(
    phase: Callable[[RadixWorkspace, SGLangView, SGLangOp, SGLangAnswer], tuple[RadixWorkspace, SGLangAnswer]],
) -> Phase:
    """A phase that needs no keys."""
    return lambda w, view, op, answer, _: phase(w, view, op, answer)


def perform(
    w: RadixWorkspace,
    view: SGLangView,
    op: SGLangOp,
    payload: Payload,
    only: tuple[SGLangCode, ...],
    answer: SGLangAnswer,
) -> tuple[RadixWorkspace, SGLangAnswer]:
    """Runs the phases of an operation."""
    for codes, phase in phases_of(only):

        def run(
            v: RadixWorkspace, local: tuple[Scalar, ...], phase: Phase = phase
        ) -> tuple[RadixWorkspace, tuple[Scalar, ...]]:
            v, got = phase(v, view, op, SGLangAnswer(*local[1:]), payload)
            return v, (False, *got)

        w, local = loop(lambda c: c[0], run, w, (answer.ok & op.on(*codes), *answer), writes=w.CARRIED)
        answer = SGLangAnswer(*local[1:])
    return w, answer


def _one(
    w: RadixWorkspace, view: SGLangView, op: SGLangOp, payload: Payload, place: Scalar, only: tuple[SGLangCode, ...]
) -> RadixWorkspace:
    known = op.on(*only)
    slotless = op.on(*SLOTLESS)
    nowhere = known & ~slotless & ~op.exists
    absent = known & ~slotless & ~op.on(SGLangCode.ADMIT) & (op.live == 0)
    status = jnp.where(known, int(Status.OK), int(Status.UNKNOWN_OPERATION))
    status = jnp.where(nowhere | absent, int(Status.NO_SUCH_SLOT), status)
    w = transitions.count_dropped(w, nowhere.astype(jnp.int32))
    answer = transitions.check(view, op, SGLangAnswer(status, *(jnp.int32(0),) * (COLUMNS - 1)))
    w, answer = perform(w, view, op, payload, only, answer)
    for column, value in zip(SGLangColumn, answer, strict=True):
        w = w.write("results", value, w.result(place, int(column)))
    return w

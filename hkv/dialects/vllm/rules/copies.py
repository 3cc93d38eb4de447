"""Copies that were reported are made: their blocks give back what they held for that (vLLM 0.33 `free_blocks`)."""

from __future__ import annotations

import jax.numpy as jnp

from hkv.dialects.vllm.rules import retire
from hkv.dialects.vllm.rules.operations import Argument, Code
from hkv.dialects.vllm.rules.transitions import Answer, Op
from hkv.machine.operation_loop import Payload
from hkv.state import free_queue
from hkv.state.loops import Scalar, loop, read
from hkv.state.status import Status
from hkv.state.workspace import Workspace

WRITES = tuple(dict.fromkeys((*retire.WRITES, "rows")))
"""Arrays that the operation writes."""


def made_copies(work: Workspace, op: Op, answer: Answer, payload: Payload) -> tuple[Workspace, Answer]:
    """COPIES: blocks give back the references that their copies held, one by one, through a row that no request has.

    One block may have been copied for several requests: it goes back to the queue with the last of its copies.
    """
    mine = answer.ok & (op.code == int(Code.COPIES))
    start, count = op.argument(Argument.KEY_START), op.argument(Argument.KEYS)
    outside = (count < 0) | (start < 0) | (start + count > payload.size)
    answer = answer.refuse(mine & outside, Status.OUT_OF_RANGE)
    answer = answer.refuse(mine & (count > work.sizes.buckets.row), Status.ROW_FULL)
    count = jnp.where(mine & answer.ok, count, 0)
    row = work.row(work.spare_slot, jnp.int32(0))

    def put(w: Workspace, local: tuple[Scalar]) -> tuple[Workspace, tuple[Scalar]]:
        block = read(payload.numbers, payload.base + start + local[0])
        return w.write("rows", block, row + local[0]), (local[0] + 1,)

    def give(w: Workspace, local: tuple[Scalar]) -> tuple[Workspace, tuple[Scalar]]:
        return free_queue.release(w, row + local[0], jnp.int32(1)), (local[0] + 1,)

    work, _ = loop(lambda c: c[0] < count, put, work, (0,), writes=("rows",))
    return loop(lambda c: c[0] < count, give, work, (0,), writes=WRITES)[0], answer

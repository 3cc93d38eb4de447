"""Operations of live schedulers: what they say of computed tokens, blocks they take along, hits they bring.

vLLM 0.33's `Scheduler` sets `num_computed_tokens` itself, frees blocks later than requests where a step still writes
them (`pop_blocks_for_free`), and adopts a hit that it cut, or had per group (`get_computed_blocks_for_connector`).
"""

from __future__ import annotations

import jax.numpy as jnp

from hkv.dialects.vllm.rules.admit import hit_blocks
from hkv.dialects.vllm.rules.operations import Argument, Code
from hkv.dialects.vllm.rules.parameters import View
from hkv.dialects.vllm.rules.retire import clear_row
from hkv.dialects.vllm.rules.transitions import EMPTY, RUNNING, WAITING, Answer, Op
from hkv.machine.operations import Payload
from hkv.state.loops import Scalar, loop, read, when
from hkv.state.state import Request, Row
from hkv.state.status import Status
from hkv.state.workspace import Workspace


def computed(work: Workspace, op: Op, answer: Answer) -> tuple[Workspace, Answer]:
    """COMPUTED: so many tokens are computed in all. Where that is fewer, nothing noted of the request holds."""
    mine = answer.ok & (op.code == int(Code.COMPUTED))
    tokens = op.argument(Argument.TOKENS)
    answer = answer.refuse(mine & (op.live == EMPTY), Status.NO_SUCH_SLOT)
    answer = answer.refuse(mine & (tokens < 0), Status.OUT_OF_RANGE)
    done, spare = mine & answer.ok, work.spare_slot
    work = work.set(jnp.where(done & (tokens < op.computed), op.slot, spare), Request.CALM, 0)
    return work.set(jnp.where(done, op.slot, spare), Request.COMPUTED, tokens), answer


def pop(work: Workspace, view: View, op: Op, answer: Answer) -> tuple[Workspace, Answer]:
    """POP: the rows of a running request are emptied; their blocks keep their references."""
    mine = answer.ok & (op.code == int(Code.POP))
    answer = answer.refuse(mine & (op.live != RUNNING), Status.NOT_RUNNING)
    groups = jnp.where(mine & answer.ok, view.num_groups, 0)

    def body(w: Workspace, local: tuple[Scalar]) -> tuple[Workspace, tuple[Scalar]]:
        return clear_row(w, op.slot, local[0]), (local[0] + 1,)

    return loop(lambda c: c[0] < groups, body, work, (0,), writes=("requests",))[0], answer


def found(work: Workspace, view: View, op: Op, answer: Answer, payload: Payload) -> tuple[Workspace, Answer]:
    """FOUND: rows of a waiting request take a hit as though it had just been looked up."""
    mine = answer.ok & (op.code == int(Code.FOUND))
    start, count = op.argument(Argument.KEY_START), op.argument(Argument.KEYS)
    outside = (count < 0) | (start < 0) | (start + count > payload.size)
    answer = answer.refuse(mine & (op.live != WAITING), Status.NOT_WAITING)
    answer = answer.refuse(mine & outside, Status.OUT_OF_RANGE)
    done = mine & answer.ok
    tokens, limit = op.argument(Argument.TOKENS), work.sizes.buckets.row

    def body(w: Workspace, local: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
        group, place, full = local
        asked = read(payload.numbers, payload.base + place)
        length = jnp.clip(asked, 0, limit)
        row = w.row(op.slot, group)

        def put(v: Workspace, inner: tuple[Scalar, Scalar]) -> tuple[Workspace, tuple[Scalar, Scalar]]:
            i, first = inner
            block = read(payload.numbers, payload.base + place + 1 + i)
            return v.write("rows", block, row + i), (i + 1, jnp.where((block != 0) & (first == length), i, first))

        w, (_, first) = loop(lambda c: c[0] < length, put, w, (0, length), writes=("rows",))
        w = w.set_row(op.slot, group, Row.HIT_FIRST, first)
        w = w.set_row(op.slot, group, Row.HIT_SHORT, hit_blocks(view, group, tokens) - length)
        return w, (group + 1, place + 1 + length, full | (asked != length))

    groups = jnp.where(done, view.num_groups, 0)
    start = (jnp.int32(0), start, jnp.bool_(False))
    work, (_, _, full) = loop(lambda c: c[0] < groups, body, work, start, writes=("rows", "requests"))
    answer = answer.refuse(mine & full, Status.ROW_FULL)

    def note(w: Workspace) -> Workspace:
        return w.set(op.slot, Request.HIT, tokens).set(op.slot, Request.HIT_CLOCK, w.clock)

    return when(done & ~full, note, work, writes=("requests",)), answer

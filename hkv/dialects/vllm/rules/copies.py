"""Copies that were reported are made: their blocks give back what they held for that (vLLM 0.33 `free_blocks`)."""

from __future__ import annotations

import jax.numpy as jnp

from hkv.dialects.vllm.rules import retire
from hkv.dialects.vllm.rules.operations import Argument, Code, Flag
from hkv.dialects.vllm.rules.transitions import Answer, Op
from hkv.machine.operations import Payload
from hkv.state import free_queue
from hkv.state.loops import Scalar, loop, peek, read
from hkv.state.status import Status
from hkv.state.workspace import Workspace

WRITES = tuple(dict.fromkeys((*retire.WRITES, "rows")))
"""Arrays that the operation writes."""


READS = ("rows", "keys", "blocks")


def describe(work: Workspace, block: Scalar) -> tuple[Scalar, Scalar, Scalar]:
    """A block, whether it has a key, and whether anything holds it."""
    return block, work.read("keys", work.key(block)) != 0, work.read("blocks", work.block(block)) < 0


def in_turn(turn: Scalar, count: Scalar) -> tuple[Scalar, Scalar]:
    """Number of the block that may give a reference back in one of `2 * count` turns, and whether it must have a key.

    Those with keys come first, in order. The others go to the queue's head together, the first one foremost, so that
    they are given back from the last on.
    """
    keyed = turn < count
    return jnp.where(keyed, turn, 2 * count - 1 - turn), keyed


def made_copies(work: Workspace, op: Op, answer: Answer, payload: Payload) -> tuple[Workspace, Answer]:
    """COPIES: blocks give back the references that their copies held, one by one, through an entry that no request has.

    There may be any number of them: a request popped on a long row gives back more than a row has. One block may have
    been copied for several requests: it goes back to the queue with the last of its copies. With `Flag.HOLD` blocks
    gain references instead.
    """
    mine = answer.ok & (op.code == int(Code.COPIES))
    start, count = op.argument(Argument.KEY_START), op.argument(Argument.KEYS)
    outside = (count < 0) | (start < 0) | (start + count > payload.size)
    answer = answer.refuse(mine & outside, Status.OUT_OF_RANGE)
    count = jnp.where(mine & answer.ok, count, 0)
    entry = work.row(work.spare_slot, jnp.int32(0))

    def put(w: Workspace, number: Scalar) -> Workspace:
        return w.write("rows", read(payload.numbers, payload.base + start + number), entry)

    def give(w: Workspace, local: tuple[Scalar, Scalar]) -> tuple[Workspace, tuple[Scalar, Scalar]]:
        turn, missing = local
        number, keyed = in_turn(turn, count)
        w = put(w, number)
        w, (block, known, held) = peek(
            turn >= 0, lambda v: describe(v, v.read("rows", entry)), w, READS, (0, False, False)
        )
        mine = (known == keyed) & (block != 0)
        w = free_queue.release(w, entry, (mine & held).astype(jnp.int32))
        return w, (turn + 1, missing | (mine & ~held))

    def hold(w: Workspace, local: tuple[Scalar]) -> tuple[Workspace, tuple[Scalar]]:
        return free_queue.hold(put(w, local[0]), entry), (local[0] + 1,)

    holding = op.flag(Flag.HOLD)
    held, given = jnp.where(holding, count, 0), jnp.where(holding, 0, 2 * count)
    work, _ = loop(lambda c: c[0] < held, hold, work, (0,), writes=("rows", *free_queue.ADOPT_WRITES))
    work, (_, missing) = loop(lambda c: c[0] < given, give, work, (jnp.int32(0), jnp.bool_(False)), writes=WRITES)
    return work, answer.refuse(missing, Status.OUT_OF_RANGE)

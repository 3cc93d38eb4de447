"""Operations of live schedulers: what they say of computed tokens, blocks they take along, hits they bring.

vLLM 0.33's `Scheduler` sets `num_computed_tokens` itself, frees blocks later than requests where a step still writes
them (`pop_blocks_for_free`), and adopts a hit that it cut, or had per group (`get_computed_blocks_for_connector`).
"""

from __future__ import annotations

import jax.numpy as jnp

from hkv.dialects.vllm.rules import retire
from hkv.dialects.vllm.rules.admit import hit_blocks
from hkv.dialects.vllm.rules.operations import Argument, Code, Flag
from hkv.dialects.vllm.rules.parameters import View
from hkv.dialects.vllm.rules.retire import clear_row
from hkv.dialects.vllm.rules.transitions import EMPTY, RUNNING, WAITING, Answer, Op
from hkv.machine.operations import Payload
from hkv.state import free_queue
from hkv.state.loops import Scalar, fori_loop, loop, peek, read, when
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
    # What was noted holds for growing requests only: a scheduler that takes tokens back begins anew.
    work = work.set(jnp.where(done & (tokens < op.computed), op.slot, spare), Request.NOOP_UNTIL, 0)
    return work.set(jnp.where(done, op.slot, spare), Request.COMPUTED, tokens), answer


def pop(work: Workspace, view: View, op: Op, answer: Answer) -> tuple[Workspace, Answer]:
    """POP: the rows of a running request are emptied; their blocks keep their references."""
    mine = answer.ok & (op.code == int(Code.POP))
    answer = answer.refuse(mine & (op.live != RUNNING), Status.NOT_RUNNING)
    groups = jnp.where(mine & answer.ok, view.num_groups, 0)

    def body(i: Scalar, w: Workspace) -> Workspace:
        return clear_row(w, op.slot, i)

    return fori_loop(0, groups, body, work, writes=("requests",)), answer


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


# Copies that were reported are made: their blocks give back what they held for that (vLLM 0.33 `free_blocks`).

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
    # Two rounds over the same ids. `free_blocks` splits them first and then appends and prepends; asking each block
    # twice gives the same order without a list.
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
    # `release` takes an entry of a row, and these blocks are in none: each in turn is put into a spare row.
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

    def hold(i: Scalar, w: Workspace) -> Workspace:
        return free_queue.hold(put(w, i), entry)

    holding = op.flag(Flag.HOLD)
    held, given = jnp.where(holding, count, 0), jnp.where(holding, 0, 2 * count)
    work = fori_loop(0, held, hold, work, writes=("rows", *free_queue.ADOPT_WRITES))
    work, (_, missing) = loop(lambda c: c[0] < given, give, work, (jnp.int32(0), jnp.bool_(False)), writes=WRITES)
    return work, answer.refuse(missing, Status.OUT_OF_RANGE)

"""Forking: a request is started from a running one, in the middle of its life, and shares what both will only read.

No engine's rule, but what block tables are for. The new request has the tokens, prefix keys and computed tokens of the
other. It shares every block that is full, and gets its own copy of the last one if that is still being written: vLLM
0.33's rows then behave as if both had computed those tokens. Copies are for the caller to make, before either request
writes.
"""

from __future__ import annotations

import jax.numpy as jnp

from hkv.dialects.vllm.rules import rows, unwritten
from hkv.dialects.vllm.rules.admit import skipped_blocks
from hkv.dialects.vllm.rules.operations import RESULT_FRONT, Argument, Code
from hkv.dialects.vllm.rules.parameters import GroupField, View
from hkv.dialects.vllm.rules.transitions import EMPTY, RUNNING, Answer, Op
from hkv.state import free_queue
from hkv.state.loops import Scalar, divide, fori_loop, loop, when
from hkv.state.state import Request, Row
from hkv.state.status import Status
from hkv.state.workspace import Workspace, report

WRITES = tuple(
    dict.fromkeys((*free_queue.TAKE_WRITES, *free_queue.ADOPT_WRITES, "requests", "results", "ids", "num_ids"))
)
"""Arrays that sharing the rows writes."""


def fork(work: Workspace, view: View, op: Op, answer: Answer, place: Scalar) -> tuple[Workspace, Answer]:
    """FORK: the request in slot TOKENS, which must be empty, is started from the running one in SLOT.

    Refused whole when a block that would be shared or copied is not there, or when too few blocks are free for the
    copies.
    """
    mine = answer.ok & (op.code == int(Code.FORK))
    asked = op.argument(Argument.TOKENS)
    inside = (asked >= 0) & (asked < work.spare_slot)
    child = jnp.where(inside, asked, work.spare_slot)
    answer = answer.refuse(mine & (op.live == EMPTY), Status.NO_SUCH_SLOT)
    answer = answer.refuse(mine & (op.live != RUNNING), Status.NOT_RUNNING)
    answer = answer.refuse(mine & ~inside, Status.NO_SUCH_SLOT)
    work, (live,) = work.peek_request(mine, child, Request.LIVE)
    answer = answer.refuse(mine & (live != EMPTY), Status.NOT_WAITING)
    work, copies, missing = _survey(work, view, op, mine & answer.ok)
    answer = answer.refuse(mine & missing, Status.BLOCK_MISSING)
    answer = answer.refuse(mine & (copies > work.free), Status.NO_ROOM)
    done = mine & answer.ok
    work = _share(work, view, op, child, place, done)
    work = when(done, lambda w: _clone(w, op, child), work, writes=("requests", "chains", "running"))
    return work, answer._replace(copies=jnp.where(done, copies, answer.copies))


def _spans(view: View, group: Scalar, computed: Scalar, length: Scalar) -> tuple[Scalar, Scalar]:
    """Entries of a row of `length` that are shared, and whether the next one is copied: none of an encoder's output."""
    block = view.group(group, GroupField.BLOCK)
    ring = view.group(group, GroupField.ONE_BLOCK) != 0
    # An encoder's output is never written again: every block of it is shared.
    encoded = view.group(group, GroupField.ENCODER) != 0
    full = jnp.where(encoded, length, jnp.where(ring, 0, divide(computed, block)))
    return full, ring | (~encoded & (full * block < computed))


def _survey(work: Workspace, view: View, op: Op, enabled: Scalar) -> tuple[Workspace, Scalar, Scalar]:
    """Number of blocks that must be copied, and True if one that is needed is not there."""

    def body(w: Workspace, local: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
        group, copies, missing = local
        w, (length, first) = w.peek_row(group >= 0, op.slot, group, Row.LENGTH, Row.FIRST)
        full, copied = _spans(view, group, op.computed, length)
        needed = full + copied
        # Of states only the last one is read; a window's past may be null.
        snapshot = view.group(group, GroupField.RECURRENT) != 0
        readable = jnp.where(snapshot, jnp.maximum(needed - 1, 0), skipped_blocks(view, group, op.computed))
        w, (last,) = w.peek(group >= 0, "rows", w.row(op.slot, group) + jnp.maximum(needed - 1, 0))
        short = (length < needed) | ((first > readable) & (readable < needed))
        gone = (needed > 0) & (last == 0) & (readable < needed)
        return w, (group + 1, copies + copied, missing | short | gone)

    groups = jnp.where(enabled, view.num_groups, 0)
    work, (_, copies, missing) = loop(lambda c: c[0] < groups, body, work, (0, 0, False), reads=("requests", "rows"))
    return work, copies, missing


def _share(work: Workspace, view: View, op: Op, child: Scalar, place: Scalar, enabled: Scalar) -> Workspace:
    def body(group: Scalar, w: Workspace) -> Workspace:
        w, (length, first) = w.peek_row(group >= 0, op.slot, group, Row.LENGTH, Row.FIRST)
        full, copied = _spans(view, group, op.computed, length)
        first = jnp.minimum(first, full)
        source, target = w.row(op.slot, group), w.row(child, group)
        start = rows.start(view, group, first)
        w = _copy(w, "rows", source + start, target + start, full - start)
        w = free_queue.adopt(w, target + start, full - start)
        # A block of its own for the last, partly filled one, which both would write.
        w = free_queue.take(w, target + full, copied.astype(jnp.int32))
        w, ends = w.peek(copied, "rows", source + full, target + full)
        for block in ends:
            w = report(w, copied, block)
        for field, value in ((Row.LENGTH, full + copied), (Row.FIRST, first), (Row.CACHED, full)):
            w = w.set_row(child, group, field, value)
        for field in (Row.PARTIAL, Row.GROWN, Row.EXPORT, Row.STANDING):
            w = w.set_row(child, group, field, 0)
        column = RESULT_FRONT + 2 * group
        w = w.write("results", full, w.result(place, column))
        return w.write("results", full + copied, w.result(place, column + 1))

    groups = jnp.where(enabled, view.num_groups, 0)
    return fori_loop(0, groups, body, work, writes=WRITES)


def _clone(work: Workspace, op: Op, child: Scalar) -> Workspace:
    """The request itself, and its prefix keys."""
    fields = tuple(Request)
    work, values = work.peek_request(op.live == RUNNING, op.slot, *fields)
    # The new request was granted no more than what is computed: its next tokens ask for blocks of their own.
    changed = {Request.HIT: -1, Request.KNOWN: 1, Request.GRANTED: op.computed, Request.NOOP_UNTIL: 0}
    for field, value in zip(fields, values, strict=True):
        work = work.set(child, field, changed.get(field, value))
    work = unwritten.note_grant(work, child, op.computed, jnp.bool_(True), op.live == RUNNING)
    work = _copy(work, "chains", work.chain(op.slot), work.chain(child), op.keys)
    return work.replace(running=work.running + 1)


def _copy(work: Workspace, name: str, source: Scalar, target: Scalar, count: Scalar) -> Workspace:
    """Copies elements within an array; each is written in the trip after the one that read it."""
    spare = getattr(work, name).shape[0] - 1

    def body(w: Workspace, local: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
        i, place, value = local
        w = w.write(name, value, place)
        return w, (i + 1, target + i, w.read(name, source + i))

    work, (_, place, value) = loop(lambda c: c[0] < count, body, work, (0, spare, 0), writes=(name,))
    return work.write(name, value, place)

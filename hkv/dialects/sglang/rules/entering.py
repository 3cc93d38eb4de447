"""Entry into the tree of what a request has computed, and what it gives back at its end.

After each chunk of its prompt, and at its end, a request's pages are entered, and the tree's take their place in its
row: pages that the tree had already are free at once. With states it is entered up to the length of one that it kept.

Twin: `reference.dialects.sglang.requests`.
"""

from __future__ import annotations

from typing import TypeAlias

import jax.numpy as jnp

from hkv.dialects.sglang.rules import locks, pools, radix_tree, states
from hkv.dialects.sglang.rules.operations import SGLangArgument, SGLangCode
from hkv.dialects.sglang.rules.parameters import Field, SGLangView
from hkv.dialects.sglang.rules.radix_tree import Entry
from hkv.dialects.sglang.rules.transitions import Own, SGLangAnswer, SGLangOp, pages_of, slide, take_rows
from hkv.state.loops import Scalar, ceil_divide, loop, when
from hkv.state.radix import RadixRequest
from hkv.state.radix_workspace import RadixWorkspace

Work: TypeAlias = RadixWorkspace


def enter(work: Work, view: SGLangView, op: SGLangOp, answer: SGLangAnswer) -> tuple[Work, SGLangAnswer]:
    """CHECKPOINT and FINISH: a request's pages are entered, the tree's take their place, and it holds the last node."""
    runs, eagle, counted = op.on(SGLangCode.CHECKPOINT), view.whole(Field.EAGLE), _counted(op)
    # The prefix that a window kept this request from using ends here, so that the next one can use it.
    branches = (op.branch > op.protected) & (op.branch * view.page + eagle <= counted)
    length = jnp.where(branches, op.branch * view.page + eagle, counted)
    work, (length, state) = _to_enter(work, view, op, length)

    def once(w: Work) -> Work:
        own = Own(op.slid, op.protected, op.tracked)
        # Before the insertion, which gives the tree the window pages that are left.
        w, slid = slide(w, view, op.slot, runs, length - eagle - 1, own, jnp.int32(1))
        pages = pages_of(view, length)
        w, (node, took) = _insert(w, view, op, pages, slid, state)
        # The tree had a state of this length already, and the copy made for it is of no use.
        w = states.give_back(w, view, jnp.where(runs & ~took, state, 0))
        for field, held in zip(states.OWN, (op.state, op.first_track, op.second_track), strict=True):
            # The tree has a state of a request that ends.
            w = w.write_if(~runs & took & (held == state), "requests", 0, w.request(op.slot, field))
        w = take_rows(w, jnp.bool_(True), op.slot, op.protected, pages)
        # In SGLang's order; nobody evicts while neither lock holds.
        w = locks.unlock(w, view, op.node, op.mark, jnp.bool_(True), op.released == 0)
        w, mark = locks.lock(w, view, jnp.bool_(True), node)
        # What is beyond the branch stays its own, and the window slides over that as if nothing had been entered.
        again, own = runs & branches, Own(slid, pages, jnp.int32(0))
        w, slid = slide(w, view, op.slot, again, op.length - eagle - 1, own, jnp.int32(1))
        fields = {
            RadixRequest.PROTECTED: pages,
            RadixRequest.ENTERED: jnp.maximum(op.entered, pages),
            RadixRequest.SLID: slid,
            RadixRequest.BRANCH: jnp.where(branches, 0, op.branch),
            RadixRequest.NODE: node,
            RadixRequest.MARK: mark,
            RadixRequest.RELEASED: 0,
        }
        for field, value in fields.items():
            w = w.write("requests", value, w.request(op.slot, field))
        return w

    # Without a state that was kept nothing is entered, and it holds what it held.
    work = when(length > 0, once, work, writes=work.CARRIED)
    for field in (RadixRequest.TRACKED, RadixRequest.TRACKED_BEFORE):
        work = work.write("requests", 0, work.request(op.slot, field))
    return work, answer


def _to_enter(work: Work, view: SGLangView, op: SGLangOp, length: Scalar) -> tuple[Work, tuple[Scalar, Scalar]]:
    """The length in tokens at which a request is entered, and the state of that length; 0 where it has kept none.

    A running request gives the tree what it kept last, and takes a fresh one for it; one that ends has no use for any.
    If what it kept last is of a token beyond its end, it gives the one before that (`_select_finished_checkpoint`).
    """
    runs, tracks = op.on(SGLangCode.CHECKPOINT), view.flag(Field.TRACKED)
    beyond = ~runs & (op.tracked > length)
    tracked = jnp.where(beyond, op.tracked_before, op.tracked)
    tracked = jnp.where(beyond & (tracked > length), 0, tracked)
    first = (1 - op.turn == 0) ^ beyond
    kept = jnp.where(first, op.first_track, op.second_track)
    # `make_room` has seen to it that there is one.
    work, fresh = states.take(work, view.stateful & runs & (~tracks | (tracked > 0)))
    place = work.request(op.slot, RadixRequest.FIRST_TRACK) + jnp.where(first, 0, 1)
    work = work.write_if(tracks & (fresh != 0), "requests", fresh, place)
    state = jnp.where(tracks, jnp.where(tracked > 0, kept, 0), jnp.where(runs, fresh, op.state))
    length = jnp.where(view.stateful & tracks, tracked, length)
    return work, (length, jnp.where(view.stateful, state, 0))


def _counted(op: SGLangOp) -> Scalar:
    """Tokens of a request that are entered: all that have slots, but for a pass beyond its end."""
    asked = jnp.where(op.on(SGLangCode.FINISH), op.argument(SGLangArgument.LENGTH), 0)
    return jnp.where(asked > 0, asked, op.length)


def _insert(
    work: Work, view: SGLangView, op: SGLangOp, pages: Scalar, slid: Scalar, state: Scalar
) -> tuple[Work, tuple[Scalar, Scalar]]:
    """Inserts a request's pages, and the state after them; the last node, and whether it took that.

    Where full attention is all there is, a prompt is parted from what was generated after it, and kept longer: it is
    likelier to come again.
    """
    prompt = pages_of(view, op.prompt)
    parts = ~view.windowed & ~view.stateful & (prompt > 0) & (prompt < pages)

    def one(w: Work, local: tuple[Scalar, ...]) -> tuple[Work, tuple[Scalar, ...]]:
        turn, last, took = local
        again = turn > 0
        entry = Entry(
            slot=op.slot,
            pages=jnp.where(again, prompt, pages),
            owned=jnp.where(again, prompt, op.protected),
            slid=jnp.where(again, 0, slid),
            counted=jnp.where(again, prompt, op.entered),
            priority=op.priority + again,
            state=jnp.where(again, 0, state),
        )
        w, (node, takes) = radix_tree.insert(w, view, jnp.bool_(True), entry)
        return w, (turn + 1, jnp.where(again, last, node), took | takes)

    # The prompt comes second: SGLang splits it off the leaf that is there by then.
    turns = jnp.where(parts, 2, 1)
    work, (_, node, took) = loop(lambda c: c[0] < turns, one, work, (0, 0, False), writes=radix_tree.WRITES)
    return work, (node, took)


def leave(work: Work, view: SGLangView, op: SGLangOp, answer: SGLangAnswer) -> tuple[Work, SGLangAnswer]:
    """FINISH, once it is entered, and ABORT: pages of its own are free, and it holds nothing."""
    fields = (RadixRequest.PROTECTED, RadixRequest.SLID, RadixRequest.NODE, RadixRequest.MARK, RadixRequest.RELEASED)
    work, (protected, slid, node, mark, released) = work.peek_request(True, op.slot, *fields)
    whole, end = ceil_divide(_counted(op), view.page), ceil_divide(op.length, view.page)

    def one(w: Work, local: tuple[Scalar, Scalar, Scalar]) -> tuple[Work, tuple[Scalar, Scalar, Scalar]]:
        turn, first, last = local
        ends = (first, jnp.clip(slid, first, last), last)
        return pools.free_own(w, view, w.row(op.slot, 0), ends), (turn + 1, last, end)

    # Pages of a pass beyond the end are given back after the others.
    work, _ = loop(lambda c: c[0] < 2, one, work, (0, protected, whole), writes=pools.WRITES)
    work = locks.unlock(work, view, node, mark, jnp.bool_(True), released == 0)
    work = states.give_back_all(work, view, op.slot)
    return work.write("requests", 0, work.request(op.slot, RadixRequest.LIVE)), answer

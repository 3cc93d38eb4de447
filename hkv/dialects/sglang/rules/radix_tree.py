"""The tree: match, split and insert over interned page keys.

What a chain of keys has in the tree is a prefix of it, whose end is found by halving (`_cached`). Then one walks down
node by node, each found by its first key, and splits the node in which the prefix ends. Positions are pages.

Twin: `reference.dialects.sglang.radix`, after SGLang 0.5.23, `unified_tree_core.py` and `components/swa.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from hkv.dialects.sglang.rules import pools, states
from hkv.dialects.sglang.rules.links import WINDOW_RING, link, node_at, unlink
from hkv.dialects.sglang.rules.parameters import Field, SGLangView
from hkv.state import tree
from hkv.state.loops import Scalar, ceil_divide, loop, when
from hkv.state.nodes import PRESENT, Node
from hkv.state.radix import FULL, WINDOW, Count, Key, PoolCount, RadixNode
from hkv.state.radix_workspace import RadixWorkspace

Work = RadixWorkspace

WRITES = (*tree.WRITES, *pools.WRITES, "chains")
"""Arrays that these functions write, `chains` and `rows` only in their spare elements."""

UNBOUNDED = 1 << 29
"""More tokens than any request has: those behind a place up to which nothing of the window is missing."""


class PrefixMatch(NamedTuple):
    """The last node at which every component could resume, its end, and that of all that full attention has."""

    node: Scalar
    length: Scalar
    full: Scalar


def match(work: Work, view: SGLangView, present: Scalar, slot: Scalar, pages: Scalar) -> tuple[Work, PrefixMatch]:
    """The longest cached prefix of so many pages of a slot's chain, if `present`; counts as a use (`match_prefix`)."""
    work, end = _cached(work, present, slot, pages)

    def down(w: Work, local: tuple[Scalar, ...]) -> tuple[Work, tuple[Scalar, ...]]:
        at, best, length, covered, _ = local
        node = w.read("keys", w.key(w.read("chains", w.chain(slot, at)), Key.HEAD))
        fields = (RadixNode.END, RadixNode.LIVE, RadixNode.STATE)
        to, live, state = (w.read("nodes", w.node(node, field)) for field in fields)
        whole = to <= end
        covered, votes = _vote(view, covered, jnp.minimum(to, end) - at, live)
        # A state is of a node's end, which the upper part of a split has not.
        votes = votes & (~view.stateful | (whole & (state != 0)))
        # The node in which the prefix ends votes by its upper part, which a split makes of it further down.
        best, length = jnp.where(votes, node, best), jnp.where(votes, jnp.minimum(to, end), length)
        return w, (jnp.where(whole, to, at), best, length, covered, jnp.where(whole, 0, node))

    begin = (0, 0, 0, UNBOUNDED, 0)
    work, (_, best, length, _, partial) = loop(
        lambda c: (c[0] < end) & (c[4] == 0), down, work, begin, reads=("keys", "chains", "nodes")
    )
    work, upper = split(work, partial != 0, partial, end, slot)
    work = _use_parts(work, view, partial != 0, (upper, partial))
    best = jnp.where((partial != 0) & (best == partial), upper, best)
    work = refresh(work, view, present, best)
    # Where there are states, only a node with one could be the best.
    work = states.use(work, view.stateful & (best != 0), best)
    work = _touch_path(work, jnp.asarray(present) & (pages > 0), slot, length)
    return work, PrefixMatch(best, length, end)


def _cached(work: Work, present: Scalar, slot: Scalar, pages: Scalar) -> tuple[Work, Scalar]:
    """Pages of a chain that are in the tree, by halving: a key is there only if all before it are."""

    def halve(w: Work, local: tuple[Scalar, Scalar]) -> tuple[Work, tuple[Scalar, Scalar]]:
        low, high = local
        middle = (low + high + 1) >> 1
        there = w.read("keys", w.key(w.read("chains", w.chain(slot, middle - 1)), Key.PAGE)) != 0
        return w, (jnp.where(there, middle, low), jnp.where(there, high, middle - 1))

    most = jnp.where(present, pages, 0)
    work, (low, _) = loop(lambda c: c[0] < c[1], halve, work, (0, most), reads=("keys", "chains"))
    return work, low


def _vote(view: SGLangView, covered: Scalar, pages: Scalar, live: Scalar) -> tuple[Scalar, Scalar]:
    """Tokens of the window that are there without a gap behind a node's end, and whether one could resume there.

    Up to the first tombstone nothing that the window reads is missing; after one, it must be there in full.
    """
    there = (live != 0) | ~view.windowed
    covered = jnp.where(there, jnp.minimum(covered + pages * view.page, UNBOUNDED), 0)
    return covered, there & (covered >= view.whole(Field.WINDOW))


def _touch_path(work: Work, present: Scalar, slot: Scalar, length: Scalar) -> Work:
    """A prefix of a chain, made of whole nodes, counts as used: the root first, so that ancestors are older."""

    def one(w: Work, local: tuple[Scalar, Scalar]) -> tuple[Work, tuple[Scalar, Scalar]]:
        at, node = local
        w = tree.use(w, jnp.bool_(True), node)
        w, (below, end) = node_at(w, slot, jnp.where(at < length, at, 0))
        return w, (jnp.where(at < length, end, at + 1), below)

    # A trip uses the node that the one before found, which ends at `at`: the last is the one that finds none.
    begin = jnp.where(present, 0, length + 1)
    return loop(lambda c: c[0] <= length, one, work, (begin, 0), writes=(*tree.WRITES, "keys", "chains"))[0]


# Splits.

_COPIED = (
    RadixNode.FIRST,
    RadixNode.START,
    RadixNode.LOCKS,
    RadixNode.WINDOW_LOCKS,
    RadixNode.MARK,
    RadixNode.HITS,
    RadixNode.PRIORITY,
    RadixNode.MADE,
    RadixNode.LIVE,
)
"""Words that the upper part of a split node has from it: whoever holds the one holds both."""


def split(work: Work, present: Scalar, node: Scalar, at: Scalar, slot: Scalar) -> tuple[Work, Scalar]:
    """Makes a new node of a node's pages before position `at`, up to which a slot's chain has them, if `present`; its
    row. The mark goes up with the older edge, a state stays with the last page. `_use_parts` follows.
    """

    def body(w: Work, _: tuple[Scalar, ...]) -> tuple[Work, tuple[Scalar, ...]]:
        w, upper = _new_row(w)
        w, copied = w.peek(upper > 0, "nodes", *(w.node(node, field) for field in _COPIED))
        w, (last,) = w.peek(upper > 0, "chains", w.chain(slot, at - 1))
        w, (lower,) = w.peek(upper > 0, "keys", w.key(last, Key.NEXT))
        w = tree.insert_above(w, jnp.bool_(True), node, upper)
        nothing = {RadixNode.STATE: 0, RadixNode.STATE_LOCKS: 0}
        for field, value in {**dict(zip(_COPIED, copied, strict=True)), **nothing, RadixNode.END: at}.items():
            w = w.write("nodes", value, w.node(upper, field))
        for field, value in ((RadixNode.FIRST, lower), (RadixNode.START, at), (RadixNode.MARK, 0)):
            w = w.write("nodes", value, w.node(node, field))
        # Two keys lead to another node than before; all between them are found through those.
        w = w.write("keys", upper, w.key(copied[0], Key.HEAD)).write("keys", node, w.key(lower, Key.HEAD))
        live = copied[_COPIED.index(RadixNode.LIVE)] != 0
        return link(w, WINDOW_RING, live, upper, node), (False, upper)

    writes = ("nodes", "keys", "chains", "counters")
    work, (_, upper) = loop(lambda c: c[0], body, work, (present, 0), writes=writes)
    return work, upper


def _use_parts(
    work: Work, view: SGLangView, present: Scalar, parts: tuple[Scalar, Scalar], whole: Scalar = False
) -> Work:
    """The upper part of a split node counts as used, and under SGLang the lower one, too, after it.

    Args:
      work: the workspace.
      view: the configuration.
      present: whether there was a split.
      parts: the upper and the lower part.
      whole: whether, without a split, the lower one is a node that counts as used.
    """
    lower = (jnp.asarray(present) & view.flag(Field.TOUCHES)) | whole

    def one(w: Work, local: tuple[Scalar]) -> tuple[Work, tuple[Scalar]]:
        # One place in the program for both: using a node is what takes long to compile.
        return tree.use(w, jnp.bool_(True), jnp.where(local[0] == 0, *parts)), (local[0] + 1,)

    begin, end = jnp.where(present, 0, 1), jnp.where(lower, 2, jnp.where(present, 1, 0))
    return loop(lambda c: c[0] < end, one, work, (begin,), writes=tree.WRITES)[0]


def _new_row(work: Work) -> tuple[Work, Scalar]:
    """A row for a node: one that a node has left, or the next."""
    work, (rows, vacant) = work.peek(True, "counters", work.count(Count.ROWS), work.count(Count.VACANT))
    again = vacant != 0
    row = jnp.where(again, vacant - 1, rows)
    work, (after,) = work.peek(again, "nodes", work.node(row, Node.NEXT))
    work = work.write("counters", jnp.where(again, rows, rows + 1), work.count(Count.ROWS))
    # The link is the row's own word: whoever enters the node writes that, but for a first child, which has none.
    work = work.write("nodes", 0, work.node(row, Node.NEXT))
    return work.write("counters", jnp.where(again, after, 0), work.count(Count.VACANT)), row


def remove(work: Work, present: Scalar, leaf: Scalar) -> Work:
    """Takes a leaf out, if `present`, whose pages are given back already."""
    work, (first,) = work.peek(present, "nodes", work.node(leaf, RadixNode.FIRST))
    work = work.write_if(present, "keys", 0, work.key(first, Key.HEAD))
    work = tree.leave(work, present, leaf)
    work, (vacant,) = work.peek(present, "counters", work.count(Count.VACANT))
    work = work.write_if(present, "nodes", vacant, work.node(leaf, Node.NEXT))
    return work.write_if(present, "counters", leaf + 1, work.count(Count.VACANT))


# The order of window pages.


def refresh(work: Work, view: SGLangView, present: Scalar, node: Scalar) -> Work:
    """Window pages behind a position come to the front, the nearest foremost, a window and a page back."""
    window = view.whole(Field.WINDOW) + view.page

    def one(w: Work, local: tuple[Scalar, ...]) -> tuple[Work, tuple[Scalar, ...]]:
        at, front, passed = local
        fields = (Node.PARENT, RadixNode.START, RadixNode.END, RadixNode.LIVE)
        w, (parent, start, end, live) = w.peek(at > 0, "nodes", *(w.node(at, field) for field in fields))
        w = unlink(w, WINDOW_RING, live != 0, at)
        w = link(w, WINDOW_RING, live != 0, at, front)
        return w, (parent - 1, jnp.where(live != 0, at, front), passed + (end - start) * view.page)

    begin = jnp.where(jnp.asarray(present) & view.windowed, node, 0)
    return loop(lambda c: (c[0] > 0) & (c[2] < window), one, work, (begin, 0, 0), writes=("nodes",))[0]


def _publish(work: Work, present: Scalar, node: Scalar) -> Work:
    """A node has window pages, if `present`, and is the one used last."""
    fields = (RadixNode.START, RadixNode.END, RadixNode.WINDOW_LOCKS)
    work, (start, end, locks) = work.peek(present, "nodes", *(work.node(node, field) for field in fields))
    work = pools.count(work, WINDOW, jnp.where(locks == 0, end - start, 0))
    work = pools.count(work, WINDOW, end - start, PoolCount.CAME)
    work = work.write_if(present, "nodes", 1, work.node(node, RadixNode.LIVE))
    return link(work, WINDOW_RING, present, node, jnp.int32(0))


# Insertion.


class Entry(NamedTuple):
    """A request's pages that are entered.

    Attributes:
      slot: whose row and chain have them.
      pages: how many.
      owned: so many are the tree's own (`prev_prefix_len`).
      slid: of so many the window's pages have been freed (`swa_evicted_seqlen`).
      counted: so many this request has entered before; nodes in there are not hit again (`inserted_len`).
      priority: of the request.
      state: the state after the last page, 0 for none.
    """

    slot: Scalar
    pages: Scalar
    owned: Scalar
    slid: Scalar
    counted: Scalar
    priority: Scalar
    state: Scalar


def insert(work: Work, view: SGLangView, present: Scalar, entry: Entry) -> tuple[Work, tuple[Scalar, Scalar]]:
    """Enters a request's pages, if `present`; those that the tree has already are freed (`insert`). The last node, and
    whether it took the state."""

    def body(w: Work, _: tuple[Scalar, ...]) -> tuple[Work, tuple[Scalar, ...]]:
        w = tree.use(w, jnp.bool_(True), jnp.int32(0))
        w = _raise(w, jnp.int32(0), entry.priority)
        w, end = _cached(w, jnp.bool_(True), entry.slot, entry.pages)

        def down(v: Work, local: tuple[Scalar, Scalar]) -> tuple[Work, tuple[Scalar, Scalar]]:
            v, node = _overlap(v, view, entry, local[0], end)
            v, (to,) = v.peek(node > 0, "nodes", v.node(node, RadixNode.END))
            return v, (to, node)

        w, (at, node) = loop(lambda c: c[0] < end, down, w, (0, 0), writes=WRITES)
        w, leaf = _new_leaf(w, view, entry, at, node)
        # After the leaf was split for its window: a state is of the end, which the lower part has.
        w, took = states.enter(w, view, entry.state, entry.slot, leaf, at == entry.pages)
        w = refresh(w, view, jnp.bool_(True), leaf)
        w, (start, to, hits) = w.peek(
            at < entry.pages, "nodes", *(w.node(leaf, f) for f in (RadixNode.START, RadixNode.END, RadixNode.HITS))
        )
        # SGLang takes the leaf's end for the beginning of what was new and the units of its last part.
        counts = (at < entry.pages) & (at + to - start > entry.counted)
        return w.write_if(counts, "nodes", hits + 1, w.node(leaf, RadixNode.HITS)), (False, leaf, took)

    work, (_, last, took) = loop(lambda c: c[0], body, work, (present, 0, False), writes=WRITES)
    return work, (last, took)


def _overlap(work: Work, view: SGLangView, entry: Entry, start: Scalar, cached: Scalar) -> tuple[Work, Scalar]:
    """Goes over the node that begins at a position, or that part of it which is entered again; its row."""
    work, (child, to) = node_at(work, entry.slot, start)
    end, begin = jnp.minimum(to, cached), jnp.maximum(start, entry.slid)
    fields = (RadixNode.LIVE, RadixNode.LOCKS)
    work, (live, locks) = work.peek(child > 0, "nodes", *(work.node(child, field) for field in fields))
    # A tombstone gets the window pages that the request computed again, but for those it has freed meanwhile.
    recovers = view.windowed & (entry.owned < end) & (live == 0) & (begin < end)

    def part(w: Work, local: tuple[Scalar, Scalar]) -> tuple[Work, tuple[Scalar, Scalar]]:
        turn, node = local
        first = turn == 0
        parts = jnp.where(first, to > cached, recovers & (begin > start))
        w, upper = split(w, parts, node, jnp.where(first, cached, begin), entry.slot)
        w = _use_parts(w, view, parts, (upper, node), first & ~parts)
        # What leaves the node below its end is not entered again; what is recovered is its latter part.
        node = jnp.where(first & parts, upper, node)
        return _raise(w, node, entry.priority), (turn + 1, node)

    work, (_, node) = loop(lambda c: c[0] < 2, part, work, (0, child), writes=WRITES)
    work = _recover(work, view, entry, jnp.where(recovers, node, 0), locks, (begin, end))
    taken = jnp.where(recovers, begin, end)
    first = jnp.minimum(jnp.maximum(start, entry.owned), taken)
    ends = (first, jnp.clip(entry.slid, first, taken), taken)
    work = pools.free_own(work, view, work.row(entry.slot, 0), ends)
    work, (hits,) = work.peek(node > 0, "nodes", work.node(node, RadixNode.HITS))
    return work.write_if(end > entry.counted, "nodes", hits + 1, work.node(node, RadixNode.HITS)), node


def _raise(work: Work, node: Scalar, priority: Scalar) -> Work:
    """A node has at least this priority."""
    work, (old,) = work.peek(node >= 0, "nodes", work.node(node, RadixNode.PRIORITY))
    return work.write("nodes", jnp.maximum(old, priority), work.node(node, RadixNode.PRIORITY))


def _recover(
    work: Work, view: SGLangView, entry: Entry, node: Scalar, locks: Scalar, span: tuple[Scalar, Scalar]
) -> Work:
    """Gives a node the window pages that a request has between two positions; no node if it is 0.

    What a request holds keeps its full pages, and the window's are mapped to them; else the node takes the request's
    full pages, too.
    """
    begin, end = span

    def body(w: Work) -> Work:
        w, place = pools.give_back(w, view, FULL, end - begin)

        def one(v: Work, local: tuple[Scalar]) -> tuple[Work, tuple[Scalar]]:
            (at,) = local
            v, (key,) = v.peek(at >= 0, "chains", v.chain(entry.slot, at))
            v, (fresh,) = v.peek(at >= 0, "rows", v.row(entry.slot, at))
            v, (old,) = v.peek(at >= 0, "keys", v.key(key, Key.PAGE))
            v, (other,) = v.peek(at >= 0, "lists", v.mapped(fresh))
            v = v.write("lists", jnp.where(locks > 0, 0, other), v.mapped(fresh))
            v = v.write_if(locks > 0, "lists", other, v.mapped(old))
            v = v.write("keys", jnp.where(locks > 0, old, fresh), v.key(key, Key.PAGE))
            return v.write("lists", jnp.where(locks > 0, fresh, old), v.listed(FULL, place + at - begin)), (at + 1,)

        w, _ = loop(lambda c: c[0] < end, one, w, (begin,), writes=("chains", "rows", "keys", "lists"))
        return _publish(w, jnp.bool_(True), node)

    return when(node > 0, body, work, writes=WRITES)


def _new_leaf(work: Work, view: SGLangView, entry: Entry, start: Scalar, parent: Scalar) -> tuple[Work, Scalar]:
    """Enters what is left of a request's pages from a position on as a leaf after a node; that node if none is."""

    def body(w: Work, _: tuple[Scalar, ...]) -> tuple[Work, tuple[Scalar, ...]]:
        w, leaf = _new_row(w)
        w, (made,) = w.peek(leaf > 0, "counters", w.count(Count.MADE))
        w = w.write("counters", made + 1, w.count(Count.MADE))
        w = pools.count(w, FULL, entry.pages - start)
        w = pools.count(w, FULL, entry.pages - start, PoolCount.CAME)

        def one(v: Work, local: tuple[Scalar, Scalar]) -> tuple[Work, tuple[Scalar, Scalar]]:
            at, key = local
            # Of the last page the key after it is read beyond the request's own: it is never followed.
            v, (after,) = v.peek(at + 1 < entry.pages, "chains", v.chain(entry.slot, at + 1))
            v, (page,) = v.peek(at >= 0, "rows", v.row(entry.slot, at))
            v = v.write("keys", page, v.key(key, Key.PAGE)).write("keys", after, v.key(key, Key.NEXT))
            return v, (at + 1, after)

        w, (first,) = w.peek(leaf > 0, "chains", w.chain(entry.slot, start))
        w, _ = loop(lambda c: c[0] < entry.pages, one, w, (start, first), writes=("chains", "rows", "keys"))
        w = w.write("keys", leaf, w.key(first, Key.HEAD))
        words = dict.fromkeys(RadixNode, 0)
        words |= {RadixNode.FIRST: first, RadixNode.START: start, RadixNode.END: entry.pages}
        words |= {RadixNode.PRIORITY: entry.priority, RadixNode.MADE: made}
        for field, value in words.items():
            w = w.write("nodes", value, w.node(leaf, field))
        w = tree.enter(w, jnp.bool_(True), leaf, parent + 1, jnp.int32(PRESENT))
        return _enter_window(w, view, entry, leaf, start), (False, leaf)

    new = start < entry.pages
    work, (_, leaf) = loop(lambda c: c[0], body, work, (new, parent), writes=WRITES)
    return work, leaf


def _enter_window(work: Work, view: SGLangView, entry: Entry, leaf: Scalar, start: Scalar) -> Work:
    """Gives a new leaf its window pages, and splits it so that its last part is no longer than a window needs.

    A request locks nodes whole: without the second split it would hold the pages of a long prompt for one window.
    """
    live, end = jnp.maximum(start, entry.slid), entry.pages
    whole = end - ceil_divide(view.whole(Field.WINDOW), view.page)

    def part(w: Work, local: tuple[Scalar]) -> tuple[Work, tuple[Scalar]]:
        first = local[0] == 0
        parts = jnp.where(first, live > start, whole > live)
        w, upper = split(w, parts, leaf, jnp.where(first, live, whole), entry.slot)
        w = _use_parts(w, view, parts, (upper, leaf))
        return _publish(w, parts & ~first, upper), (local[0] + 1,)

    enters = view.windowed & (live < end)
    work, _ = loop(lambda c: enters & (c[0] < 2), part, work, (0,), writes=WRITES)
    return _publish(work, enters, leaf)

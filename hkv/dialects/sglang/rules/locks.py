"""Locks: what running requests hold of the tree, walked from a node up to the root.

A request holds the full pages of its whole prefix, of the window's those that a window back from its node reaches, and
the node's state; where the window ends the node gets a mark, which the request keeps. A node that anybody holds is
barred from eviction.

Twin: `reference.dialects.sglang.holding`.
"""

from __future__ import annotations

import jax.numpy as jnp

from hkv.dialects.sglang.rules import pools, states
from hkv.dialects.sglang.rules.parameters import Field, SGLangView
from hkv.state import tree
from hkv.state.loops import Scalar, loop
from hkv.state.nodes import BARRED, Node
from hkv.state.radix import FULL, WINDOW, Count, RadixNode
from hkv.state.radix_workspace import RadixWorkspace

WRITES = (*tree.WRITES, "counters")
"""Arrays that these functions write."""

_WORDS = (
    Node.PARENT,
    RadixNode.LOCKS,
    RadixNode.WINDOW_LOCKS,
    RadixNode.MARK,
    RadixNode.START,
    RadixNode.END,
    RadixNode.LIVE,
)


def lock(work: RadixWorkspace, view: SGLangView, present: Scalar, node: Scalar) -> tuple[RadixWorkspace, Scalar]:
    """Holds a node and what is before it, if `present` (`inc_lock_ref`); the mark, 0 where the window reaches the
    root."""
    window = view.whole(Field.WINDOW)

    # Links are 1 plus a node, and the root is node 0, which nobody locks: a walk ends there.
    def one(w: RadixWorkspace, local: tuple[Scalar, ...]) -> tuple[RadixWorkspace, tuple[Scalar, ...]]:
        at, covered, kept = local
        w, words = w.peek(at > 0, "nodes", *(w.node(at, field) for field in _WORDS))
        parent, locks, window_locks, mark, start, end, live = words
        w = w.write("nodes", locks + 1, w.node(at, RadixNode.LOCKS))
        # A flag, so that the bitmap of leaves need not ask for locks: it has only those that nobody holds.
        w = tree.mark(w, locks == 0, at, jnp.int32(BARRED))
        # Nodes are held whole: the window ends inside the last one that is counted.
        reads = covered < window
        w = w.write_if(reads, "nodes", window_locks + 1, w.node(at, RadixNode.WINDOW_LOCKS))
        # Kept as it changes: schedules read every step how much nobody holds, and no walk over the tree could.
        w = pools.count(w, FULL, jnp.where(locks == 0, start - end, 0))
        w = pools.count(w, WINDOW, jnp.where(reads & (window_locks == 0) & (live != 0), start - end, 0))
        covered = covered + jnp.where(reads, (end - start) * view.page, 0)
        ends = reads & (covered >= window)
        # A node keeps the name that the first lock gave it, so that all that end here undo up to the same edge.
        names = ends & (mark == 0)
        w, (marks,) = w.peek(names, "counters", w.count(Count.MARKS))
        mark = jnp.where(names, marks + 1, mark)
        w = w.write_if(names, "counters", mark, w.count(Count.MARKS))
        w = w.write_if(names, "nodes", mark, w.node(at, RadixNode.MARK))
        return w, (parent - 1, covered, jnp.where(ends, mark, kept))

    work = states.hold(work, view, present, node, 1)
    begin = (jnp.where(present, node, 0), 0, 0)
    work, (_, _, kept) = loop(lambda c: c[0] > 0, one, work, begin, writes=WRITES)
    return work, kept


def unlock(
    work: RadixWorkspace, view: SGLangView, node: Scalar, mark: Scalar, full: Scalar, window: Scalar
) -> RadixWorkspace:
    """Undoes a lock on a node: `full`, its part that goes up to the root; `window`, the one up to the mark, and the
    state's."""

    def one(w: RadixWorkspace, local: tuple[Scalar, Scalar]) -> tuple[RadixWorkspace, tuple[Scalar, Scalar]]:
        at, inside = local
        w, words = w.peek(at > 0, "nodes", *(w.node(at, field) for field in _WORDS))
        parent, locks, window_locks, found, start, end, live = words
        w = w.write_if(full, "nodes", locks - 1, w.node(at, RadixNode.LOCKS))
        w = tree.mark(w, full & (locks == 1), at, jnp.int32(0))
        w = w.write_if(inside, "nodes", window_locks - 1, w.node(at, RadixNode.WINDOW_LOCKS))
        w = pools.count(w, FULL, jnp.where(full & (locks == 1), end - start, 0))
        w = pools.count(w, WINDOW, jnp.where(inside & (window_locks == 1) & (live != 0), end - start, 0))
        inside = inside & ((mark == 0) | (found != mark))
        return w, (jnp.where(full | inside, parent - 1, 0), inside)

    # A state is held as long as the window is, in caches without a window, too.
    work = states.hold(work, view, window, node, -1)
    window = window & view.windowed
    begin = (jnp.where(jnp.logical_or(full, window), node, 0), window)
    return loop(lambda c: c[0] > 0, one, work, begin, writes=WRITES)[0]

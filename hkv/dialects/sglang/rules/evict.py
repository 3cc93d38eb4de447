"""Eviction: leaves leave whole, as a policy orders them; window pages leave by recency, wherever they are.

One loop walks over both: a stage for each component, a trip for each node that is looked at. Nodes that requests hold
are passed over, so a walk costs what leaves and what is held, whatever else is cached.

Twin: `reference.dialects.sglang.eviction`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from hkv.dialects.sglang.config import POLICIES
from hkv.dialects.sglang.rules import pools, radix_tree
from hkv.dialects.sglang.rules.parameters import Field, View
from hkv.dialects.sglang.rules.radix_tree import WINDOW_RING
from hkv.state import tree
from hkv.state.loops import Scalar, loop
from hkv.state.nodes import LEAF, Node
from hkv.state.radix import FULL, WINDOW, PoolCount, RadixNode
from hkv.state.radix_workspace import RadixWorkspace

WRITES = radix_tree.WRITES
"""Arrays that these functions write."""


class Wanted(NamedTuple):
    """Tokens that an eviction is to free.

    Attributes:
      full, window: so many of each pool; or, if `room`, until there is room for so many.
      room: whether it makes room. The engine counts what a pool lacks before it begins, and looks at the pool again
        after every node. The window's walk stops, too, once it freed what was lacking.
    """

    full: Scalar
    window: Scalar
    room: Scalar


class Freed(NamedTuple):
    """Tokens that were freed of each pool."""

    full: Scalar
    window: Scalar


def evict(work: RadixWorkspace, view: View, present: Scalar, wanted: Wanted) -> tuple[RadixWorkspace, Freed]:
    """Frees what is wanted, or as much as there is, if `present` (`evict`, `evict_for_alloc`)."""
    room = wanted.room
    work, (full_free, window_free) = _room(work, view, jnp.asarray(present) & room)
    lacking = (wanted.full - full_free, wanted.window - window_free)

    def enough(stage: Scalar, freed: tuple[Scalar, Scalar], now: tuple[Scalar, Scalar]) -> Scalar:
        full = (lacking[0] <= 0) | (now[0] >= wanted.full)
        window = (lacking[1] <= 0) | (now[1] >= wanted.window) | (freed[1] >= lacking[1])
        full, window = (
            jnp.where(room, full, freed[0] >= wanted.full),
            jnp.where(room, window, freed[1] >= wanted.window),
        )
        return jnp.where(stage == FULL, full, window)

    def one(w: RadixWorkspace, local: tuple[Scalar, ...]) -> tuple[RadixWorkspace, tuple[Scalar, ...]]:
        stage, cursor, stranded, *freed = local
        w, now = _room(w, view, room)
        follows = stranded != 0
        done = enough(stage, (freed[0], freed[1]), now) & ~follows
        w, leaf = _first_leaf(w, view, (stage == FULL) & ~done & ~follows)
        none = jnp.where(stage == FULL, done | (leaf == 0), cursor == 0) & ~follows
        node = jnp.where(follows, stranded, jnp.where(stage == FULL, leaf, cursor))
        fields = (Node.FLAGS, Node.PARENT, RadixNode.START, RadixNode.END, RadixNode.LIVE, RadixNode.WINDOW_LOCKS)
        w, words = w.peek(~none, "nodes", *(w.node(node, field) for field in (*fields, RadixNode.NEWER)))
        flags, parent, start, end, live, locks, newer = words
        held = (stage == WINDOW) & (locks > 0) & ~follows
        # What is held is passed over before it is asked whether there is enough.
        over = none | (done & ~held)
        goes = ~over & ~held
        whole = goes & (follows | (stage == FULL) | ((flags & LEAF) != 0))
        tokens = (end - start) * view.page
        w = shed(w, view, goes, node, (end - start, live), whole)
        w, stranded = _stranded(w, view, whole, parent - 1)
        w, (oldest,) = w.peek(over & (stage == FULL), "nodes", w.node(0, RadixNode.NEWER))
        full, window = freed[0] + jnp.where(whole, tokens, 0), freed[1] + jnp.where(goes & (live != 0), tokens, 0)
        cursor = jnp.where(over, oldest, jnp.where(follows, cursor, newer))
        return w, (stage + over, cursor, stranded, full, window)

    stages = jnp.where(present, jnp.where(view.windowed, 2, 1), 0)
    work, local = loop(lambda c: c[0] < stages, one, work, (FULL, 0, 0, 0, 0), writes=WRITES)
    return work, Freed(*local[3:])


def _first_leaf(work: RadixWorkspace, view: View, present: Scalar) -> tuple[RadixWorkspace, Scalar]:
    """The leaf that leaves first under the policy, if `present`; 0 for none.

    Under lru it is the first in order of use. The other policies look at every leaf, as SGLang does when it makes a
    heap of them; of equals the one that was used longest ago leaves.
    """
    policy, none = view.whole(Field.POLICY), work.sizes.buckets.places

    def one(w: RadixWorkspace, local: tuple[Scalar, ...]) -> tuple[RadixWorkspace, tuple[Scalar, ...]]:
        place, best, least = local
        w, (place, node) = tree.first_from(w, jnp.bool_(True), place)
        fields = (RadixNode.HITS, RadixNode.MADE, RadixNode.PRIORITY)
        w, (hits, made, priority) = w.peek(place < none, "nodes", *(w.node(node, field) for field in fields))
        by = {"lru": 0, "mru": -place, "fifo": made, "filo": -made, "lfu": hits, "slru": hits >= 2}
        rank = jnp.int32(0)
        for number, name in enumerate(POLICIES):
            rank = jnp.where(policy == number, {**by, "priority": priority}[name], rank)
        better = (place < none) & ((best == 0) | (rank < least))
        ends = (policy == POLICIES.index("lru")) | (place == none)
        return w, (jnp.where(ends, none, place + 1), jnp.where(better, node, best), jnp.where(better, rank, least))

    begin = (jnp.where(present, 0, none), 0, 0)
    work, (_, best, _) = loop(lambda c: c[0] < none, one, work, begin, writes=(*tree.WRITES,))
    return work, best


def _stranded(work: RadixWorkspace, view: View, present: Scalar, parent: Scalar) -> tuple[RadixWorkspace, Scalar]:
    """The parent of a leaf that left, if it is a leaf itself now and a tombstone, and so of no use; else 0.

    SGLang leaves it there (`hkv.dialects.sglang.config.STRANDS_FULL`).
    """
    present = present & view.windowed & ~view.flag(Field.STRANDS)
    work, (flags, live) = work.peek(present, "nodes", work.node(parent, Node.FLAGS), work.node(parent, RadixNode.LIVE))
    return work, jnp.where(present & ((flags & LEAF) != 0) & (live == 0), parent, 0)


def _room(work: RadixWorkspace, view: View, present: Scalar) -> tuple[RadixWorkspace, tuple[Scalar, Scalar]]:
    """Tokens that each pool has room for."""
    work, full = pools.free_pages(work, present, FULL)
    work, window = pools.free_pages(work, present, WINDOW)
    return work, (full * view.page, window * view.page)


def shed(
    work: RadixWorkspace, view: View, present: Scalar, node: Scalar, has: tuple[Scalar, Scalar], whole: Scalar
) -> RadixWorkspace:
    """Takes window pages from a node, if `present`, or, if `whole`, takes the leaf that it is out with all it has.

    `has`: its pages, and whether it has the window's.
    """
    pages, live = has
    window = jnp.asarray(present) & (live != 0)
    # What leaves is held by nobody: nodes that are, in this pool, are passed over.
    for pool, goes in ((FULL, whole), (WINDOW, window)):
        work = pools.count(work, pool, jnp.where(goes, -pages, 0))
        work = pools.count(work, pool, jnp.where(goes, pages, 0), PoolCount.LEFT)
    work = pools.free_node(work, view, node, jnp.where(present, pages, 0), whole, window)
    work = radix_tree.unlink(work, WINDOW_RING, window, node)
    work = work.write_if(window, "nodes", 0, work.node(node, RadixNode.LIVE))
    return radix_tree.remove(work, whole, node)

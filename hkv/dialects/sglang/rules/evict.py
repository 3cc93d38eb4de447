"""Eviction: leaves leave whole, as a policy orders them; window pages and states leave by recency, wherever they are.

One loop walks over all: a stage for each component, a trip for each node that is looked at. Nodes that requests hold
are passed over, so a walk costs what leaves and what is held, whatever else is cached.

Twin: `reference.dialects.sglang.evicting`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from hkv.dialects.sglang.config import POLICIES
from hkv.dialects.sglang.rules import pools, radix_tree, states
from hkv.dialects.sglang.rules.links import STATE_RING, WINDOW_RING, unlink
from hkv.dialects.sglang.rules.parameters import Field, SGLangView
from hkv.state import tree
from hkv.state.loops import Scalar, loop
from hkv.state.nodes import LEAF, Node
from hkv.state.radix import FULL, POOLS, STATES, WINDOW, Count, PoolCount, RadixNode
from hkv.state.radix_workspace import RadixWorkspace

WRITES = radix_tree.WRITES
"""Arrays that these functions write."""


class Wanted(NamedTuple):
    """Tokens, and states, that an eviction is to free.

    Attributes:
      full, window, states: so many of each pool; or, if `room`, until there is room for so many.
      room: whether it makes room: then pools are looked at after every node.
    """

    full: Scalar
    window: Scalar
    states: Scalar
    room: Scalar


class Freed(NamedTuple):
    """Tokens, and states, that were freed of each pool."""

    full: Scalar
    window: Scalar
    states: Scalar


def evict(work: RadixWorkspace, view: SGLangView, present: Scalar, wanted: Wanted) -> tuple[RadixWorkspace, Freed]:
    """Frees what is wanted, or as much as there is, if `present` (`evict`, `evict_for_alloc`)."""
    room, due = wanted.room, wanted[:3]

    def enough(stage: Scalar, freed: Freed, now: tuple[Scalar, ...]) -> Scalar:
        found = jnp.bool_(False)
        for pool in POOLS:
            found = jnp.where(stage == pool, jnp.where(room, now[pool], freed[pool]) >= due[pool], found)
        return found

    def one(w: RadixWorkspace, local: tuple[Scalar, ...]) -> tuple[RadixWorkspace, tuple[Scalar, ...]]:
        stage, cursor, stranded, evictions, *counts = local
        freed = Freed(*counts)
        w, now = _room(w, view, room)
        follows = stranded != 0
        done = enough(stage, freed, now) & ~follows
        w, leaf = _first_leaf(w, view, (stage == FULL) & ~done & ~follows)
        none = jnp.where(stage == FULL, done | (leaf == 0), cursor == 0) & ~follows
        node = jnp.where(follows, stranded, jnp.where(stage == FULL, leaf, cursor))
        w, words = w.peek(~none, "nodes", *(w.node(node, field) for field in _ASKED))
        flags, parent, start, end, live, *locks, newer, state_newer = words
        # `live`: whether it has window pages. `locks` are the window's and the state's: the first stage asks for none,
        # as leaves are in the bitmap only while nobody locks them.
        held = (stage != FULL) & (jnp.where(stage == WINDOW, *locks) > 0) & ~follows
        # What is held is passed over before it is asked whether there is enough, as in SGLang's walk.
        over = none | (done & ~held)
        goes = ~over & ~held
        # `LEAF`: nothing comes after it and nobody holds any part of it, so that it leaves with all that it has.
        whole = goes & (follows | (stage == FULL) | ((flags & LEAF) != 0))
        window = goes & (whole | (stage == WINDOW)) & (live != 0)
        w, had_state = shed(w, view, goes, node, end - start, (whole, window))
        # After it has left, which may make a leaf of its parent. Links are 1 plus a node's row.
        w, stranded = _stranded(w, view, whole, parent - 1)
        # The next stage, of the window's pages, then of states, begins at the old end of its ring as it is by then:
        # `ring[0]` of the root, node 0.
        w, oldest = w.peek(over, "nodes", *(w.node(0, ring[0]) for ring in (WINDOW_RING, STATE_RING)))
        tokens = (end - start) * view.page
        freed = (jnp.where(whole, tokens, 0), jnp.where(window, tokens, 0), had_state)
        following = jnp.where(stage == WINDOW, newer, state_newer)
        # A tombstone may have a state, and so be next in turn when it leaves with the last of what came after it.
        cursor = jnp.where(follows & (node != cursor), cursor, following)
        cursor = jnp.where(over, jnp.where(stage == FULL, *oldest), cursor)
        counts = [a + b for a, b in zip(counts, freed, strict=True)]
        return w, (stage + over, cursor, stranded, evictions + goes, *counts)

    # `FULL`, `WINDOW` and `STATES` are 0, 1 and 2, as the stages are.
    stages = jnp.where(present, jnp.where(view.stateful, 3, jnp.where(view.windowed, 2, 1)), 0)
    work, local = loop(lambda c: c[0] < stages, one, work, (FULL, 0, 0, 0, 0, 0, 0), writes=WRITES)
    evictions = local[3]
    work, (before,) = work.peek(evictions > 0, "counters", work.count(Count.EVICTIONS))
    work = work.write_if(evictions > 0, "counters", before + evictions, work.count(Count.EVICTIONS))
    return work, Freed(*local[4:])


_ASKED = (
    *(Node.FLAGS, Node.PARENT, RadixNode.START, RadixNode.END, RadixNode.LIVE),
    *(RadixNode.WINDOW_LOCKS, RadixNode.STATE_LOCKS, RadixNode.NEWER, RadixNode.STATE_NEWER),
)
"""Words of a node that decide what of it may be evicted."""


def _first_leaf(work: RadixWorkspace, view: SGLangView, present: Scalar) -> tuple[RadixWorkspace, Scalar]:
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
        # slru: SGLang protects nodes of two hits (`SLRUStrategy.protected_threshold`).
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


def _stranded(work: RadixWorkspace, view: SGLangView, present: Scalar, parent: Scalar) -> tuple[RadixWorkspace, Scalar]:
    """The parent of a leaf that left, if it is a leaf itself now and a tombstone, and so of no use; else 0.

    SGLang leaves it there (`hkv.dialects.sglang.config.STRANDS_FULL`).
    """
    present = present & view.windowed & ~view.flag(Field.STRANDS)
    work, (flags, live) = work.peek(present, "nodes", work.node(parent, Node.FLAGS), work.node(parent, RadixNode.LIVE))
    return work, jnp.where(present & ((flags & LEAF) != 0) & (live == 0), parent, 0)


def _room(work: RadixWorkspace, view: SGLangView, present: Scalar) -> tuple[RadixWorkspace, tuple[Scalar, ...]]:
    """Tokens that each pool has room for, and states."""
    # Pages that wait to be sorted in are as free as those that have been.
    fields = PoolCount.FREE, PoolCount.WAITING
    work, counts = work.peek(present, "counters", *(work.pool_count(pool, each) for pool in POOLS for each in fields))
    free = [counts[2 * pool] + counts[2 * pool + 1] for pool in POOLS]
    return work, (free[FULL] * view.page, free[WINDOW] * view.page, free[STATES])


def shed(
    work: RadixWorkspace, view: SGLangView, present: Scalar, node: Scalar, pages: Scalar, parts: tuple[Scalar, Scalar]
) -> tuple[RadixWorkspace, Scalar]:
    """Takes a node's state from it, if `present`, and other parts of what it has; whether it had one.

    Args:
      work: the workspace.
      view: the configuration.
      present: whether the node loses anything. A state without its window is of no use.
      node: the node.
      pages: its pages.
      parts: whether it is a leaf that is taken out, and whether its window pages are freed.
    """
    whole, window = parts
    # What leaves is held by nobody, as nodes that are, in this pool, are passed over: so many fewer are UNHELD, and so
    # many more have LEFT.
    for pool, goes in ((FULL, whole), (WINDOW, window)):
        work = pools.count(work, pool, jnp.where(goes, -pages, 0))
        work = pools.count(work, pool, jnp.where(goes, pages, 0), PoolCount.LEFT)
    # One walk over the node's keys for both pools: keys know the full pages, and these are mapped to the window's.
    work = pools.free_node(work, view, node, jnp.where(jnp.asarray(whole) | window, pages, 0), whole, window)
    work = unlink(work, WINDOW_RING, window, node)
    work = work.write_if(window, "nodes", 0, work.node(node, RadixNode.LIVE))
    # Before the row is free: a ring must not lead to a node that is gone.
    work, had_state = states.drop(work, view, jnp.asarray(present) & view.stateful, node)
    return radix_tree.remove(work, whole, node), had_state

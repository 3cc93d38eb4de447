"""States of recurrent layers: what a request has of them, and what nodes have.

A node has one at most, of the length that it ends at. A request has one of its own, and, if states are tracked, two in
turn that keep what it was at lengths it has passed; what it enters becomes a node's. A state is shared with nobody: who
resumes at a node copies its state into one of its own.

Twin: `reference.dialects.sglang.radix` and `reference.dialects.sglang.requests`.
"""

from __future__ import annotations

from typing import TypeAlias

import jax.numpy as jnp

from hkv.dialects.sglang.rules import pools
from hkv.dialects.sglang.rules.links import STATE_RING, link, node_at, unlink
from hkv.dialects.sglang.rules.parameters import Field, SGLangView
from hkv.state import tree
from hkv.state.loops import Scalar, loop
from hkv.state.nodes import Node
from hkv.state.radix import STATES, PoolCount, RadixNode, RadixRequest
from hkv.state.radix_workspace import RadixWorkspace

Work: TypeAlias = RadixWorkspace

OWN = (RadixRequest.STATE, RadixRequest.FIRST_TRACK, RadixRequest.SECOND_TRACK)
"""Words of a request that are states, one after the other."""

WRITES = (*tree.WRITES, *pools.WRITES, "chains")
"""Arrays that functions on nodes write, `rows` and `chains` only in their spare elements."""


# Of requests.


def take(work: Work, present: Scalar) -> tuple[Work, Scalar]:
    """A free state, if `present`; 0 if none is free."""
    work, free = pools.free_pages(work, present, STATES)
    work, place = pools.take(work, STATES, jnp.where(free > 0, 1, 0))
    work, (state,) = work.peek(free > 0, "lists", work.listed(STATES, place))
    return work, state


def give_back(work: Work, view: SGLangView, state: Scalar) -> Work:
    """Frees a state, unless it is 0."""
    work, place = pools.give_back(work, view, STATES, jnp.where(state != 0, 1, 0))
    return work.write_if(state != 0, "lists", state, work.listed(STATES, place))


def missing(view: SGLangView, own: Scalar, first: Scalar) -> Scalar:
    """States that a request with these two lacks for a pass (`ensure_mamba_capacity`)."""
    pair = jnp.where(view.flag(Field.TRACKED) & (first == 0), 2, 0)
    return jnp.where(view.stateful, pair + (own == 0), 0)


def take_missing(work: Work, slot: Scalar, count: Scalar) -> Work:
    """Gives a request so many of the states it has not, its own first; there are as many."""

    def one(w: Work, local: tuple[Scalar, Scalar]) -> tuple[Work, tuple[Scalar, Scalar]]:
        turn, left = local
        place = w.request(slot, OWN[0]) + turn
        w, (old,) = w.peek(turn >= 0, "requests", place)
        # There are as many as lack, for nobody takes one between the eviction that saw to it and this.
        w, state = take(w, old == 0)
        return w.write_if(old == 0, "requests", state, place), (turn + 1, left - (old == 0))

    return loop(lambda c: c[1] > 0, one, work, (0, count), writes=("requests", *pools.WRITES))[0]


def give_back_all(work: Work, view: SGLangView, slot: Scalar) -> Work:
    """Frees a request's states."""

    def one(w: Work, local: tuple[Scalar]) -> tuple[Work, tuple[Scalar]]:
        place = w.request(slot, OWN[0]) + local[0]
        w, (state,) = w.peek(local[0] >= 0, "requests", place)
        return give_back(w, view, state).write("requests", 0, place), (local[0] + 1,)

    begin = jnp.where(view.stateful, 0, len(OWN))
    return loop(lambda c: c[0] < len(OWN), one, work, (begin,), writes=("requests", *pools.WRITES))[0]


# Of nodes.


def hold(work: Work, view: SGLangView, present: Scalar, node: Scalar, change: int) -> Work:
    """One more request holds a node's state, if `present`, whether it has one or not; or, with -1, one less."""
    present = jnp.asarray(present) & view.stateful & (node > 0)
    fields = (RadixNode.STATE, RadixNode.STATE_LOCKS)
    work, (state, locks) = work.peek(present, "nodes", *(work.node(node, field) for field in fields))
    work = work.write_if(present, "nodes", locks + change, work.node(node, RadixNode.STATE_LOCKS))
    # What is counted is a state that nobody holds. A lock may be older than the state: then it was never counted.
    alone = present & (state != 0) & (jnp.minimum(locks, locks + change) == 0)
    return pools.count(work, STATES, jnp.where(alone, -change, 0))


def use(work: Work, present: Scalar, node: Scalar) -> Work:
    """A node with a state becomes the one used last of these, if `present`."""
    work = unlink(work, STATE_RING, present, node)
    return link(work, STATE_RING, present, node, jnp.int32(0))


def drop(work: Work, view: SGLangView, present: Scalar, node: Scalar) -> tuple[Work, Scalar]:
    """Takes a node's state from it, if `present` and it has one that nobody holds; whether it had."""
    work, (state,) = work.peek(present, "nodes", work.node(node, RadixNode.STATE))
    there = state != 0
    # Callers pass over states that are held, so that this one was counted among those that nobody holds.
    work = pools.count(work, STATES, jnp.where(there, -1, 0))
    work = pools.count(work, STATES, jnp.where(there, 1, 0), PoolCount.LEFT)
    work = give_back(work, view, state)
    work = unlink(work, STATE_RING, there, node)
    return work.write_if(there, "nodes", 0, work.node(node, RadixNode.STATE)), there


def enter(work: Work, view: SGLangView, state: Scalar, slot: Scalar, node: Scalar, old: Scalar) -> tuple[Work, Scalar]:
    """Gives the last node of a slot's chain a state, unless that is 0; whether it took it, as one without a state does.

    Either way it counts as used. `old`: whether the node was there before, and not just made and used.
    """

    def once(w: Work, _: tuple[Scalar, Scalar]) -> tuple[Work, tuple[Scalar, Scalar]]:
        fields = (RadixNode.STATE, RadixNode.STATE_LOCKS, RadixNode.START)
        w, (before, locks, start) = w.peek(node > 0, "nodes", *(w.node(node, field) for field in fields))
        takes = before == 0
        # Out of its place first: a node that was linked in twice would make two rings of one.
        w = unlink(w, STATE_RING, ~takes, node)
        w = link(w, STATE_RING, jnp.bool_(True), node, jnp.int32(0))
        w = w.write_if(takes, "nodes", state, w.node(node, RadixNode.STATE))
        w = pools.count(w, STATES, jnp.where(takes & (locks == 0), 1, 0))
        w = pools.count(w, STATES, jnp.where(takes, 1, 0), PoolCount.CAME)
        # A node just made was used before the parts that were split off it, and stays older than they are.
        w = tree.use(w, old, node)
        return _thin(w, view, takes, slot, (node, start)), (False, takes)

    enters = (state != 0) & (node > 0)
    work, (_, took) = loop(lambda c: c[0], once, work, (enters, False), writes=WRITES)
    return work, took


def _thin(work: Work, view: SGLangView, present: Scalar, slot: Scalar, tail: tuple[Scalar, Scalar]) -> Work:
    """Drops states nearest the root, if `present`, where the path to a node has more than it may; not those that are
    held or branched from. `tail`: the node, and its start."""
    most, (last, end) = view.whole(Field.MOST), tail

    def up(w: Work, local: tuple[Scalar, Scalar]) -> tuple[Work, tuple[Scalar, Scalar]]:
        at, count = local
        parent, state = (w.read("nodes", w.node(at, field)) for field in (Node.PARENT, RadixNode.STATE))
        return w, (parent - 1, count + (state != 0))

    begin = jnp.where(jnp.asarray(present) & (most > 0), last, 0)
    work, (_, count) = loop(lambda c: c[0] > 0, up, work, (begin, 0), reads=("nodes",))

    # Downwards, since which of several goes, and the order in which they are freed, begins at the root.
    def down(w: Work, local: tuple[Scalar, Scalar]) -> tuple[Work, tuple[Scalar, Scalar]]:
        at, excess = local
        w, (node, to) = node_at(w, slot, at)
        w, (locks, child) = w.peek(node > 0, "nodes", w.node(node, RadixNode.STATE_LOCKS), w.node(node, Node.CHILD))
        w, (sibling,) = w.peek(child > 0, "nodes", w.node(jnp.maximum(child - 1, 0), Node.NEXT))
        w, dropped = drop(w, view, (locks == 0) & (sibling == 0), node)
        return w, (to, excess - dropped)

    excess = jnp.where(begin > 0, count - most, 0)
    return loop(lambda c: (c[1] > 0) & (c[0] < end), down, work, (0, excess), writes=WRITES)[0]

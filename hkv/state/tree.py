"""A tree of cached keys by links through the nodes' own rows: which key builds on which, and where eviction may begin.

A node is named by its row, in the tree or not, so that a child may come before its parent and hangs loose while that
is away. Links may not close a circle: a key builds on shorter prefixes.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from hkv.state import leaves
from hkv.state.loops import Scalar, loop
from hkv.state.nodes import LEAF, PINNED, PRESENT, Node
from hkv.state.pooled_workspace import PooledWorkspace

WRITES = leaves.WRITES
"""Arrays that these functions write."""


class Above(NamedTuple):
    """The way up from a node: 1 plus its parent, 0 for none in the tree; nothing at the parent or below it is pinned;
    the parent itself is; the node is its only child."""

    parent: Scalar
    free: Scalar
    pinned: Scalar
    alone: Scalar


def enter(work: PooledWorkspace, present: Scalar, node: Scalar, parent: Scalar, flags: Scalar) -> PooledWorkspace:
    """Puts a node into the tree, or under another parent (1 plus it, 0 for none), if `present`; it counts as used."""
    work, (old, known) = _words(work, present, node, Node.PARENT, Node.FLAGS)
    moves = jnp.asarray(present) & (old != parent)
    work = _detach(work, moves & (old != 0), node)
    work = leaves.use(work, present, node)
    work = work.write_if(present & (known == 0), "nodes", PRESENT, work.node(node, Node.FLAGS))
    work = mark(work, present, node, flags)
    return _attach(work, moves & (parent != 0), node, parent)


def leave(work: PooledWorkspace, present: Scalar, node: Scalar) -> PooledWorkspace:
    """Takes a node out, if `present` and it is in; its children hang loose."""
    work, (parent, flags, place) = _words(work, present, node, Node.PARENT, Node.FLAGS, Node.PLACE)
    there = jnp.asarray(present) & (flags != 0)
    work = _detach(work, there & (parent != 0), node)
    work = work.write_if(there, "nodes", flags & LEAF, work.node(node, Node.FLAGS))
    work = leaves.refresh(work, there, node)
    return leaves.forget(work, there, node, place)


def mark(work: PooledWorkspace, present: Scalar, node: Scalar, flags: Scalar) -> PooledWorkspace:
    """Sets `PINNED` and `BARRED` of a node to those of `flags`, if `present` and it is in."""
    work, (old, held, parent) = _words(work, present, node, Node.FLAGS, Node.HELD, Node.PARENT)
    there = jnp.asarray(present) & (old != 0)
    work = work.write_if(there, "nodes", (old & (PRESENT | LEAF)) | flags, work.node(node, Node.FLAGS))
    changed = (flags & PINNED) - (old & PINNED)
    work = _hold(work, there & (changed != 0) & (held == 0), parent, jnp.where(changed > 0, 1, -1))
    return leaves.refresh(work, there, node)


def look_up(work: PooledWorkspace, node: Scalar) -> Above:
    """The way up from a node in the tree; reads `nodes` within a loop that writes none."""
    parent, after, before = (
        work.read("nodes", work.node(node, each)) for each in (Node.PARENT, Node.NEXT, Node.PREVIOUS)
    )
    above = jnp.maximum(parent - 1, 0)
    flags, held = (work.read("nodes", work.node(above, each)) for each in (Node.FLAGS, Node.HELD))
    there = (parent != 0) & (flags != 0)
    pinned = (flags & PINNED) != 0
    return Above(jnp.where(there, parent, 0), ~pinned & (held == 0), pinned, (after == 0) & (before == 0))


def top(work: PooledWorkspace, enabled: Scalar, leaf: Scalar) -> tuple[PooledWorkspace, Scalar]:
    """The upper end of a leaf's chain: upwards, whatever is not pinned and has one child."""

    def climb(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        node, _ = local
        above = look_up(w, node)
        further = (above.parent != 0) & ~above.pinned & above.alone
        return w, (jnp.where(further, above.parent - 1, node), further)

    work, (node, _) = loop(lambda c: c[1], climb, work, (leaf, enabled), reads=("nodes",))
    return work, node


def _words(
    work: PooledWorkspace, present: Scalar, node: Scalar, *fields: Node
) -> tuple[PooledWorkspace, tuple[Scalar, ...]]:
    return work.peek(present, "nodes", *(work.node(node, field) for field in fields))


def _attach(work: PooledWorkspace, present: Scalar, node: Scalar, parent: Scalar) -> PooledWorkspace:
    """Makes a node without a parent the first child of one."""
    above = jnp.maximum(parent - 1, 0)
    work, (first,) = _words(work, present, above, Node.CHILD)
    work, (flags, held) = _words(work, present, node, Node.FLAGS, Node.HELD)
    work = work.write_if(present, "nodes", parent, work.node(node, Node.PARENT))
    work = work.write_if(present, "nodes", first, work.node(node, Node.NEXT))
    work = work.write_if(present & (first != 0), "nodes", node + 1, work.node(jnp.maximum(first - 1, 0), Node.PREVIOUS))
    work = work.write_if(present, "nodes", node + 1, work.node(above, Node.CHILD))
    work = _hold(work, present & (((flags & PINNED) != 0) | (held != 0)), parent, jnp.int32(1))
    return leaves.refresh(work, present & (first == 0), above)


def _detach(work: PooledWorkspace, present: Scalar, node: Scalar) -> PooledWorkspace:
    """Takes a node from its parent's children."""
    fields = Node.PARENT, Node.NEXT, Node.PREVIOUS, Node.FLAGS, Node.HELD
    work, (parent, after, before, flags, held) = _words(work, present, node, *fields)
    above = jnp.maximum(parent - 1, 0)
    for field in (Node.PARENT, Node.NEXT, Node.PREVIOUS):
        work = work.write_if(present, "nodes", 0, work.node(node, field))
    first = present & (before == 0)
    work = work.write_if(first, "nodes", after, work.node(above, Node.CHILD))
    work = work.write_if(present & (before != 0), "nodes", after, work.node(jnp.maximum(before - 1, 0), Node.NEXT))
    work = work.write_if(present & (after != 0), "nodes", before, work.node(jnp.maximum(after - 1, 0), Node.PREVIOUS))
    work = _hold(work, present & (((flags & PINNED) != 0) | (held != 0)), parent, jnp.int32(-1))
    return leaves.refresh(work, first & (after == 0), above)


def _hold(work: PooledWorkspace, present: Scalar, parent: Scalar, change: Scalar) -> PooledWorkspace:
    """Counts a child below which something is pinned, or no longer is, upwards until that changes nothing more."""

    def one(w: PooledWorkspace, local: tuple[Scalar]) -> tuple[PooledWorkspace, tuple[Scalar]]:
        node = local[0] - 1
        w, (held, flags, above) = _words(w, node >= 0, node, Node.HELD, Node.FLAGS, Node.PARENT)
        w = w.write("nodes", held + change, w.node(node, Node.HELD))
        turned = ((held == 0) | (held + change == 0)) & ((flags & PINNED) == 0)
        return w, (jnp.where(turned, above, 0),)

    return loop(lambda c: c[0] != 0, one, work, (jnp.where(present, parent, 0),), writes=("nodes",))[0]

"""RTP-LLM's prefix tree of `SharedBlockCache`: nodes for each key's names, kept in step with its item.

A key has a node as a sequence's own key, and under context parallelism one as that of a virtual block. Without a tree
(`PooledBuckets.names` is 0) nothing here does anything, nor is it compiled.
"""

from __future__ import annotations

import jax.numpy as jnp

from hkv.state import item_table, tree
from hkv.state.loops import Scalar, divide, fori_loop, loop
from hkv.state.nodes import BARRED, PINNED, Node
from hkv.state.pooled_workspace import PooledWorkspace

WRITES = tree.WRITES
"""Arrays that these functions write."""

DEFAULT, GPU_LOGICAL, GPU_CP_CANONICAL = range(3)
"""Namespaces of what a key builds on (RTP-LLM's numbers): of its own; the sequence's keys; keys of virtual blocks. A
cache has the first or the second, never both, so that they share a node."""


def find(work: PooledWorkspace, present: Scalar, key: Scalar, group: Scalar) -> tuple[PooledWorkspace, Scalar]:
    """A key's block in a group, 0 for none (`item_table.find`). All nodes of the key count as used, too."""
    work, block = item_table.find(work, present, key, group)
    names = work.sizes.buckets.names

    def use(i: Scalar, w: PooledWorkspace) -> PooledWorkspace:
        node = key * names + i
        w, (flags,) = w.peek(node >= 0, "nodes", w.node(node, Node.FLAGS))
        return tree.use(w, flags != 0, node)

    if names:
        work = fori_loop(jnp.where(present, 0, names), names, use, work, writes=WRITES)
    return work, block


def enter(
    work: PooledWorkspace, present: Scalar, key: Scalar, namespace: Scalar, parent: Scalar, flags: Scalar
) -> PooledWorkspace:
    """Enters one of a key's names, if `present`, once its item was changed; `parent` is 1 plus the key that it builds
    on.

    `flags` are the item's: a resident key pins all its nodes, and eviction does not begin at a sequence's own key whose
    item builds on a virtual block's.
    """
    names = work.sizes.buckets.names
    if not names:
        return work
    name = (namespace == GPU_CP_CANONICAL) & (names > 1)
    pinned = jnp.where((flags & item_table.RESIDENT) != 0, PINNED, 0)
    barred = jnp.where(flags // item_table.NAMESPACE == GPU_CP_CANONICAL, BARRED, 0)
    # A key that names itself as its parent would close a circle.
    builds = (parent != 0) & (parent - 1 != key)
    # A name builds on the parent's name of the same namespace; links are 1 plus a node, 0 for none.
    above = jnp.where(builds, (parent - 1) * names + name + 1, 0)
    own = pinned | jnp.where(name, 0, barred)
    work = tree.enter(work, present, key * names + name, above, own)

    def mark(w: PooledWorkspace, local: tuple[Scalar]) -> tuple[PooledWorkspace, tuple[Scalar]]:
        other = local[0]
        return tree.mark(w, other >= 0, key * names + other, pinned | jnp.where(other == 0, barred, 0)), (other + 1,)

    if names > 1:
        work, _ = loop(lambda c: c[0] < names, mark, work, (jnp.where(present, 0, names),), writes=WRITES)
    return work


def remove(work: PooledWorkspace, present: Scalar, key: Scalar) -> PooledWorkspace:
    """Takes all nodes of a key out, if `present`. What builds on them are roots, until it is entered again."""
    names = work.sizes.buckets.names

    def one(i: Scalar, w: PooledWorkspace) -> PooledWorkspace:
        node = key * names + i
        w, (flags,) = w.peek(i >= 0, "nodes", w.node(node, Node.FLAGS))
        # Children of a node that is not in the tree wait for it: they came first.
        return tree.orphan(tree.leave(w, i >= 0, node), flags != 0, node)

    if names:
        work = fori_loop(jnp.where(present, 0, names), names, one, work, writes=WRITES)
    return work


def key_of(work: PooledWorkspace, node: Scalar) -> Scalar:
    """The key that a node is a name of."""
    return divide(node, work.sizes.buckets.names)

"""Links between nodes: rings in order of use, and the node at a position of a chain.

Nodes with window pages, and nodes with states, are each in a ring through the nodes, which the root begins: of it, the
one link leads to the node used last and the other to the one used longest ago.
"""

from __future__ import annotations

from typing import TypeAlias

from hkv.state.loops import Scalar, peek
from hkv.state.radix import Key, RadixNode
from hkv.state.radix_workspace import RadixWorkspace

Work: TypeAlias = RadixWorkspace

Ring: TypeAlias = tuple[RadixNode, RadixNode]
"""Words of a node that lead to the one used next after it, and to the one used next before."""

WINDOW_RING: Ring = (RadixNode.NEWER, RadixNode.OLDER)
"""Nodes with window pages."""

STATE_RING: Ring = (RadixNode.STATE_NEWER, RadixNode.STATE_OLDER)
"""Nodes with states."""


def link(work: Work, ring: Ring, present: Scalar, node: Scalar, newer: Scalar) -> Work:
    """Puts a node right behind another one, if `present`: as the one used next before it; behind the root, foremost."""
    work, (older,) = work.peek(present, "nodes", work.node(newer, ring[1]))
    for row, field, value in (
        (node, ring[0], newer),
        (node, ring[1], older),
        (newer, ring[1], node),
        (older, ring[0], node),
    ):
        work = work.write_if(present, "nodes", value, work.node(row, field))
    return work


def unlink(work: Work, ring: Ring, present: Scalar, node: Scalar) -> Work:
    """Takes a node out of a ring, if `present`."""
    work, (newer, older) = work.peek(present, "nodes", *(work.node(node, field) for field in ring))
    work = work.write_if(present, "nodes", older, work.node(newer, ring[1]))
    return work.write_if(present, "nodes", newer, work.node(older, ring[0]))


def node_at(work: Work, slot: Scalar, at: Scalar) -> tuple[Work, tuple[Scalar, Scalar]]:
    """The node that begins at a position of a slot's chain, and its end."""

    def look(w: Work) -> tuple[Scalar, Scalar]:
        node = w.read("keys", w.key(w.read("chains", w.chain(slot, at)), Key.HEAD))
        return node, w.read("nodes", w.node(node, RadixNode.END))

    return peek(at >= 0, look, work, ("keys", "chains", "nodes"), (0, 0))  # type: ignore[return-value]

"""Arrays of a tree of cached keys: its nodes, and the order in which they were used.

A row a node, links as row numbers: what pointers are to RTP-LLM's prefix tree. `hkv.state.tree` has the operations.
"""

from __future__ import annotations

import enum

import numpy as np


class Node(enum.IntEnum):
    """Words of a node in `PooledState.nodes`. Links to other nodes are 1 plus their number, 0 for none."""

    PARENT = 0
    """The node that it builds on, in the tree or not."""
    CHILD = 1
    """A node that builds on it, the first of its list of siblings, which may come before the node itself."""
    NEXT = 2
    """The next sibling."""
    PREVIOUS = 3
    HELD = 4
    """Children that are pinned, or below which a node is."""
    FLAGS = 5
    """`PRESENT`, `PINNED`, `BARRED` and `LEAF`; 0 while it is not in the tree."""
    PLACE = 6
    """1 plus its place in order of use, 0 while it is not in the tree."""
    BORN = 7
    """The pass of eviction in which it became a leaf."""


# A bit each, so that one comparison says whether a node is a leaf (`hkv.state.tree.refresh`).
PRESENT, PINNED, BARRED, LEAF = 1, 2, 4, 8
"""Bits of `Node.FLAGS`: in the tree; never evicted; eviction does not begin there; eviction may begin there."""

NODE_WORDS = len(Node)
"""Words of a row of `PooledState.nodes`."""

CLOCK, PASS, ORDER_WORDS = range(3)
"""Words of `PooledState.uses` before its levels: the next place, and the number of the pass of eviction at work."""


def bitmap_levels(ids: int) -> tuple[int, ...]:
    """Words in each level of a bitmap, the ids' own first; each bit of the next says where any are set."""
    sizes = [-(-ids // 32)]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 32))
    return tuple(sizes)


def places_of(nodes: int) -> int:
    """Places of `nodes` nodes: twice as many, so that closing the gaps is paid for by as many uses."""
    return 2 * nodes


def order_words(nodes: int) -> int:
    """Elements of the order of use of so many nodes, none for no nodes, besides the spare one."""
    places = places_of(nodes)
    return ORDER_WORDS + sum(bitmap_levels(places)) + places if nodes else 0


def empty_nodes(nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Arrays of a tree with nothing in it, a spare row and a spare element included."""
    return np.zeros((nodes + 1, NODE_WORDS), np.int32), np.zeros(order_words(nodes) + 1, np.int32)


def moved_nodes(nodes: np.ndarray, order: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The same tree with room for `size` nodes. Host-only."""
    old = len(nodes) - 1
    new, places = empty_nodes(size)
    new[:old] = nodes[:old]
    if old:
        begin, end = (ORDER_WORDS + sum(bitmap_levels(places_of(count))) for count in (old, size))
        places[:ORDER_WORDS] = order[:ORDER_WORDS]
        places[end : end + places_of(old)] = order[begin:-1]
        leaves = new[new[:, Node.FLAGS] & LEAF != 0, Node.PLACE] - 1
        start = ORDER_WORDS
        for words in bitmap_levels(places_of(size)):
            # Several leaves may share a word: `at` accumulates, plain indexing would keep the last of them.
            np.bitwise_or.at(places, start + leaves // 32, np.left_shift(1, leaves % 32).astype(np.int32))
            leaves, start = leaves // 32, start + words
    return new, places

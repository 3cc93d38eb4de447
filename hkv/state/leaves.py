"""Nodes of a tree in order of use, and which of them are leaves: the least recently used leaf is found by its place.

A use moves a node to the next place. Leaves are the members of a bitmap of places, of one level for each factor of 32,
so that finding the first leaf from a place on costs two words a level, however many nodes there are. When the places
are used up, the gaps between them are closed; as there are twice as many places as nodes, the uses since have paid
for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from hkv.state.id_bitmap import lowest
from hkv.state.loops import Scalar, loop, peek
from hkv.state.nodes import CLOCK, LEAF, PASS, PRESENT, Node
from hkv.state.pooled_workspace import PooledWorkspace

WRITES = ("nodes", "uses")
"""Arrays that these functions write."""


def use(work: PooledWorkspace, present: Scalar, node: Scalar) -> PooledWorkspace:
    """Makes a node, in the tree or about to be, the most recently used, if `present`."""
    # Before the place is taken: a node that is used at the very moment the places run out needs one of the new ones.
    work = _close_gaps(work, present)
    work, (clock, flags, old) = peek(
        present,
        lambda w: (
            w.read("uses", w.order_word(CLOCK)),
            w.read("nodes", w.node(node, Node.FLAGS)),
            w.read("nodes", w.node(node, Node.PLACE)),
        ),
        work,
        WRITES,
        (0, 0, 0),
    )
    work = _move(work, present, node, (old, clock + 1), (flags & LEAF) != 0)
    return work.write_if(present, "uses", clock + 1, work.order_word(CLOCK))


def forget(work: PooledWorkspace, present: Scalar, node: Scalar, place: Scalar) -> PooledWorkspace:
    """Frees the place of a node that is no leaf, if `present`; `place` is its `Node.PLACE`."""
    work = work.write_if(present, "uses", 0, work.place(jnp.maximum(place - 1, 0)))
    return work.write_if(present, "nodes", 0, work.node(node, Node.PLACE))


def first_from(work: PooledWorkspace, enabled: Scalar, place: Scalar) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
    """The first leaf at a place or after it: its place, that behind the last for none, and the node."""
    levels = work.sizes.buckets.order_levels
    none = work.sizes.buckets.places

    def find(w: PooledWorkspace) -> tuple[Scalar, Scalar]:
        found, start, depth, position = jnp.bool_(False), jnp.int32(0), jnp.int32(0), place
        for level, size in enumerate(levels):
            index = position >> 5
            # Upwards: the first level at which a word has a bit at or behind the place. Each level up begins one word
            # further, since the word below has been looked at.
            inside = index < size
            word = w.read("uses", w.leaf_word(level, jnp.where(inside, index, 0)))
            word = jnp.where(inside, word & jnp.left_shift(jnp.int32(-1), position & 31), 0)
            here = ~found & (word != 0)
            start = jnp.where(here, index * 32 + lowest(word), start)
            depth = jnp.where(here, level, depth)
            found, position = found | here, index + 1
        for level in reversed(range(len(levels) - 1)):
            # Downwards: the lowest bit of each word, as in `hkv.state.id_bitmap`.
            down = found & (depth > level)
            word = w.read("uses", w.leaf_word(level, jnp.where(down, start, 0)))
            start = jnp.where(down, start * 32 + lowest(word), start)
        node = w.read("uses", w.place(jnp.where(found, start, 0))) - 1
        return jnp.where(found, start, none), jnp.where(found, node, 0)

    work, (place, node) = peek(enabled, find, work, ("uses",), (none, 0))
    return work, (place, node)


def refresh(work: PooledWorkspace, present: Scalar, node: Scalar) -> PooledWorkspace:
    """Finds out whether a node is a leaf, if `present`: in the tree, neither pinned nor barred, without children."""
    work, (flags, child, place, now) = peek(
        present,
        lambda w: (
            *(w.read("nodes", w.node(node, field)) for field in (Node.FLAGS, Node.CHILD, Node.PLACE)),
            w.read("uses", w.order_word(PASS)),
        ),
        work,
        WRITES,
        (0, 0, 0, 0),
    )
    # In the tree, and neither pinned nor barred: any other flag keeps eviction from beginning here.
    leaf = ((flags & ~LEAF) == PRESENT) & (child == 0)
    changes = jnp.asarray(present) & (leaf != ((flags & LEAF) != 0))
    work = work.write_if(changes, "nodes", flags ^ LEAF, work.node(node, Node.FLAGS))
    # RTP-LLM evicts by passes: a node that becomes a leaf during a pass waits for the next one.
    work = work.write_if(changes, "nodes", now, work.node(node, Node.BORN))
    work = _clear(work, changes & ~leaf, place - 1)
    return _set(work, changes & leaf, place - 1)


def _move(
    work: PooledWorkspace, present: Scalar, node: Scalar, places: tuple[Scalar, Scalar], leaf: Scalar
) -> PooledWorkspace:
    """Moves a node from one `Node.PLACE` to another, the first of which may be 0."""
    old, new = places
    known = jnp.asarray(present) & (old != 0)
    work = _clear(work, known & leaf, old - 1)
    work = work.write_if(known, "uses", 0, work.place(jnp.maximum(old - 1, 0)))
    work = work.write_if(present, "uses", node + 1, work.place(jnp.maximum(new - 1, 0)))
    work = work.write_if(present, "nodes", new, work.node(node, Node.PLACE))
    return _set(work, jnp.asarray(present) & leaf, new - 1)


def _close_gaps(work: PooledWorkspace, present: Scalar) -> PooledWorkspace:
    """Moves all nodes to the first places, in order, if `present` and no place is left."""
    end = work.sizes.buckets.places
    work, (clock,) = work.peek(present, "uses", work.order_word(CLOCK))
    full = clock >= end

    def one(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        place, kept = local
        w, (named,) = w.peek(place >= 0, "uses", w.place(place))
        node, there = jnp.maximum(named - 1, 0), named != 0
        w, (flags,) = w.peek(there, "nodes", w.node(node, Node.FLAGS))
        # In place, since the target is never behind the source: gaps only ever move nodes towards the beginning.
        w = _move(w, there, node, (place + 1, kept + 1), (flags & LEAF) != 0)
        return w, (place + 1, kept + there)

    begin = jnp.where(full, 0, end)
    work, (_, kept) = loop(lambda c: c[0] < end, one, work, (begin, 0), writes=WRITES)
    return work.write_if(full, "uses", kept, work.order_word(CLOCK))


def _path(work: PooledWorkspace, present: Scalar, place: Scalar) -> tuple[PooledWorkspace, tuple[Scalar, ...]]:
    levels = range(len(work.sizes.buckets.order_levels))
    return work.peek(present, "uses", *(work.leaf_word(level, place >> (5 * level + 5)) for level in levels))


def _set(work: PooledWorkspace, present: Scalar, place: Scalar) -> PooledWorkspace:
    place = jnp.maximum(place, 0)
    work, words = _path(work, present, place)
    return _write_words(work, present, place, [word | _bit(place, level) for level, word in enumerate(words)])


def _clear(work: PooledWorkspace, present: Scalar, place: Scalar) -> PooledWorkspace:
    place = jnp.maximum(place, 0)
    work, words = _path(work, present, place)
    rest, emptied = [], jnp.bool_(True)
    for level, word in enumerate(words):
        rest.append(jnp.where(emptied, word & ~_bit(place, level), word))
        emptied = emptied & (rest[-1] == 0)
    return _write_words(work, present, place, rest)


def _bit(place: Scalar, level: int) -> Scalar:
    return jnp.left_shift(jnp.int32(1), (place >> (5 * level)) & 31)


def _write_words(work: PooledWorkspace, present: Scalar, place: Scalar, words: Sequence[Scalar]) -> PooledWorkspace:
    for level, word in enumerate(words):
        work = work.write_if(present, "uses", word, work.leaf_word(level, place >> (5 * level + 5)))
    return work

"""A tree of cached keys by links through the nodes' own rows: which key builds on which, and where eviction may begin
(RTP-LLM's prefix tree of `SharedBlockCache`, whose leaves are evicted first).

A node is named by its row, in the tree or not, so that a child may come before its parent and waits for it. Links may
not close a circle: a key builds on shorter prefixes.

The least recently used leaf is found by its place. A use moves a node to the next place. Leaves are the members of a
bitmap of places, of one level for each factor of 32, so that finding the first leaf from a place on costs two words a
level, however many nodes there are. When the places are used up, the gaps between them are closed; as there are twice
as many places as nodes, the uses since have paid for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import jax.numpy as jnp

from hkv.state.flat_arrays import TreeArrays
from hkv.state.loops import Scalar, loop, peek
from hkv.state.nodes import CLOCK, LEAF, PASS, PINNED, PRESENT, Node
from hkv.state.role_counts import lowest

T = TypeVar("T", bound=TreeArrays)
"""A workspace."""

WRITES = ("nodes", "uses")
"""Arrays that these functions write."""


class Above(NamedTuple):
    """The way up from a node: 1 plus its parent, 0 for none in the tree; nothing at the parent or below it is pinned;
    the parent itself is; the node is its only child."""

    parent: Scalar
    free: Scalar
    pinned: Scalar
    alone: Scalar


def enter(work: T, present: Scalar, node: Scalar, parent: Scalar, flags: Scalar) -> T:
    """Puts a node into the tree, or under another parent (1 plus it, 0 for none), if `present`; it counts as used."""
    work, (old, known) = _words(work, present, node, Node.PARENT, Node.FLAGS)
    moves = jnp.asarray(present) & (old != parent)
    work = _detach(work, moves & (old != 0), node)
    work = use(work, present, node)
    work = work.write_if(present & (known == 0), "nodes", PRESENT, work.node(node, Node.FLAGS))
    work = mark(work, present, node, flags)
    return _attach(work, moves & (parent != 0), node, parent)


def insert_above(work: T, present: Scalar, node: Scalar, upper: Scalar) -> T:
    """Puts a new node between a node in the tree and its parent, if `present`: it takes the node's place among its
    siblings, and has it as its only child. Neither counts as used. For trees without pins."""
    fields = Node.PARENT, Node.NEXT, Node.PREVIOUS, Node.FLAGS
    work, (parent, after, before, flags) = _words(work, present, node, *fields)
    own = {Node.PARENT: parent, Node.CHILD: node + 1, Node.NEXT: after, Node.PREVIOUS: before, Node.HELD: 0}
    # It has a child, so it is no leaf; the node below keeps its children, and with them what it is.
    for field, value in {**own, Node.FLAGS: flags & ~LEAF, Node.PLACE: 0}.items():
        work = work.write_if(present, "nodes", value, work.node(upper, field))
    first = present & (before == 0) & (parent != 0)
    work = work.write_if(first, "nodes", upper + 1, work.node(jnp.maximum(parent - 1, 0), Node.CHILD))
    work = work.write_if(present & (before != 0), "nodes", upper + 1, work.node(jnp.maximum(before - 1, 0), Node.NEXT))
    work = work.write_if(
        present & (after != 0), "nodes", upper + 1, work.node(jnp.maximum(after - 1, 0), Node.PREVIOUS)
    )
    for field, value in ((Node.PARENT, upper + 1), (Node.NEXT, 0), (Node.PREVIOUS, 0)):
        work = work.write_if(present, "nodes", value, work.node(node, field))
    return work


def leave(work: T, present: Scalar, node: Scalar) -> T:
    """Takes a node out, if `present` and it is in; its children wait for it, unless they are made roots (`orphan`)."""
    work, (parent, flags, place) = _words(work, present, node, Node.PARENT, Node.FLAGS, Node.PLACE)
    there = jnp.asarray(present) & (flags != 0)
    work = _detach(work, there & (parent != 0), node)
    work = work.write_if(there, "nodes", flags & LEAF, work.node(node, Node.FLAGS))
    work = refresh(work, there, node)
    return forget(work, there, node, place)


def orphan(work: T, present: Scalar, node: Scalar) -> T:
    """Makes the children of a node that has just left the tree roots, if `present`."""
    work, (child,) = _words(work, present, node, Node.CHILD)

    def one(w: T, local: tuple[Scalar]) -> tuple[T, tuple[Scalar]]:
        each = local[0] - 1
        w, (after,) = _words(w, each >= 0, each, Node.NEXT)
        for field in (Node.PARENT, Node.NEXT, Node.PREVIOUS):
            w = w.write("nodes", 0, w.node(each, field))
        return w, (after,)

    work, _ = loop(lambda c: c[0] != 0, one, work, (jnp.where(present, child, 0),), writes=("nodes",))
    for field in (Node.CHILD, Node.HELD):
        work = work.write_if(present, "nodes", 0, work.node(node, field))
    return work


def mark(work: T, present: Scalar, node: Scalar, flags: Scalar) -> T:
    """Sets `PINNED` and `BARRED` of a node to those of `flags`, if `present` and it is in."""
    work, (old, held, parent) = _words(work, present, node, Node.FLAGS, Node.HELD, Node.PARENT)
    there = jnp.asarray(present) & (old != 0)
    work = work.write_if(there, "nodes", (old & (PRESENT | LEAF)) | flags, work.node(node, Node.FLAGS))
    changed = (flags & PINNED) - (old & PINNED)
    work = _hold(work, there & (changed != 0) & (held == 0), parent, jnp.where(changed > 0, 1, -1))
    return refresh(work, there, node)


def look_up(work: TreeArrays, node: Scalar) -> Above:
    """The way up from a node in the tree; reads `nodes` within a loop that writes none."""
    parent, after, before = (
        work.read("nodes", work.node(node, each)) for each in (Node.PARENT, Node.NEXT, Node.PREVIOUS)
    )
    above = jnp.maximum(parent - 1, 0)
    flags, held = (work.read("nodes", work.node(above, each)) for each in (Node.FLAGS, Node.HELD))
    there = (parent != 0) & (flags != 0)
    pinned = (flags & PINNED) != 0
    return Above(jnp.where(there, parent, 0), ~pinned & (held == 0), pinned, (after == 0) & (before == 0))


def top(work: T, enabled: Scalar, leaf: Scalar) -> tuple[T, Scalar]:
    """The upper end of a leaf's chain: upwards, whatever is not pinned and has one child."""

    def climb(w: T, local: tuple[Scalar, Scalar]) -> tuple[T, tuple[Scalar, Scalar]]:
        node, _ = local
        above = look_up(w, node)
        further = (above.parent != 0) & ~above.pinned & above.alone
        return w, (jnp.where(further, above.parent - 1, node), further)

    work, (node, _) = loop(lambda c: c[1], climb, work, (leaf, enabled), reads=("nodes",))
    return work, node


def _words(work: T, present: Scalar, node: Scalar, *fields: Node) -> tuple[T, tuple[Scalar, ...]]:
    return work.peek(present, "nodes", *(work.node(node, field) for field in fields))


def _attach(work: T, present: Scalar, node: Scalar, parent: Scalar) -> T:
    """Makes a node without a parent the first child of one."""
    above = jnp.maximum(parent - 1, 0)
    work, (first,) = _words(work, present, above, Node.CHILD)
    work, (flags, held) = _words(work, present, node, Node.FLAGS, Node.HELD)
    work = work.write_if(present, "nodes", parent, work.node(node, Node.PARENT))
    work = work.write_if(present, "nodes", first, work.node(node, Node.NEXT))
    work = work.write_if(present & (first != 0), "nodes", node + 1, work.node(jnp.maximum(first - 1, 0), Node.PREVIOUS))
    work = work.write_if(present, "nodes", node + 1, work.node(above, Node.CHILD))
    work = _hold(work, present & (((flags & PINNED) != 0) | (held != 0)), parent, jnp.int32(1))
    return refresh(work, present & (first == 0), above)


def _detach(work: T, present: Scalar, node: Scalar) -> T:
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
    return refresh(work, first & (after == 0), above)


def _hold(work: T, present: Scalar, parent: Scalar, change: Scalar) -> T:
    """Counts a child below which something is pinned, or no longer is, upwards until that changes nothing more."""
    if not work.PINS:
        return work

    def one(w: T, local: tuple[Scalar]) -> tuple[T, tuple[Scalar]]:
        node = local[0] - 1
        w, (held, flags, above) = _words(w, node >= 0, node, Node.HELD, Node.FLAGS, Node.PARENT)
        w = w.write("nodes", held + change, w.node(node, Node.HELD))
        turned = ((held == 0) | (held + change == 0)) & ((flags & PINNED) == 0)
        return w, (jnp.where(turned, above, 0),)

    return loop(lambda c: c[0] != 0, one, work, (jnp.where(present, parent, 0),), writes=("nodes",))[0]


# Nodes in order of use, and which of them are leaves.


def use(work: T, present: Scalar, node: Scalar) -> T:
    """Makes a node, in the tree or about to be, the most recently used, if `present`."""
    # Before the place is taken: a node that is used at the very moment the places run out needs one of the new ones.
    work = _close_gaps(work, present)
    own = (("nodes", work.node(node, field)) for field in (Node.FLAGS, Node.PLACE))
    work, (clock, flags, old) = work.peek_each(present, ("uses", work.order_word(CLOCK)), *own)
    work = _move(work, present, node, (old, clock + 1), (flags & LEAF) != 0)
    return work.write_if(present, "uses", clock + 1, work.order_word(CLOCK))


def forget(work: T, present: Scalar, node: Scalar, place: Scalar) -> T:
    """Frees the place of a node that is no leaf, if `present`; `place` is its `Node.PLACE`."""
    work = work.write_if(present, "uses", 0, work.place(jnp.maximum(place - 1, 0)))
    return work.write_if(present, "nodes", 0, work.node(node, Node.PLACE))


def first_from(work: T, enabled: Scalar, place: Scalar) -> tuple[T, tuple[Scalar, ...]]:
    """The first leaf at a place or after it: its place, that behind the last for none, and the node."""
    levels = work.sizes.buckets.order_levels
    none = work.sizes.buckets.places

    def find(w: T) -> tuple[Scalar, Scalar]:
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
            # Downwards: the lowest bit of each word, as in `hkv.state.role_counts`.
            down = found & (depth > level)
            word = w.read("uses", w.leaf_word(level, jnp.where(down, start, 0)))
            start = jnp.where(down, start * 32 + lowest(word), start)
        node = w.read("uses", w.place(jnp.where(found, start, 0))) - 1
        return jnp.where(found, start, none), jnp.where(found, node, 0)

    return peek(enabled, find, work, ("uses",), (none, 0))


def refresh(work: T, present: Scalar, node: Scalar) -> T:
    """Finds out whether a node is a leaf, if `present`: in the tree, neither pinned nor barred, without children."""
    own = (("nodes", work.node(node, field)) for field in (Node.FLAGS, Node.CHILD, Node.PLACE))
    work, (flags, child, place, now) = work.peek_each(present, *own, ("uses", work.order_word(PASS)))
    # In the tree, and neither pinned nor barred: any other flag keeps eviction from beginning here.
    leaf = ((flags & ~LEAF) == PRESENT) & (child == 0)
    changes = jnp.asarray(present) & (leaf != ((flags & LEAF) != 0))
    work = work.write_if(changes, "nodes", flags ^ LEAF, work.node(node, Node.FLAGS))
    # RTP-LLM evicts by passes: a node that becomes a leaf during a pass waits for the next one.
    work = work.write_if(changes, "nodes", now, work.node(node, Node.BORN))
    work = _clear(work, changes & ~leaf, place - 1)
    return _set(work, changes & leaf, place - 1)


def _move(work: T, present: Scalar, node: Scalar, places: tuple[Scalar, Scalar], leaf: Scalar) -> T:
    """Moves a node from one `Node.PLACE` to another, the first of which may be 0."""
    old, new = places
    known = jnp.asarray(present) & (old != 0)
    work = _clear(work, known & leaf, old - 1)
    work = work.write_if(known, "uses", 0, work.place(jnp.maximum(old - 1, 0)))
    work = work.write_if(present, "uses", node + 1, work.place(jnp.maximum(new - 1, 0)))
    work = work.write_if(present, "nodes", new, work.node(node, Node.PLACE))
    return _set(work, jnp.asarray(present) & leaf, new - 1)


def _close_gaps(work: T, present: Scalar) -> T:
    """Moves all nodes to the first places, in order, if `present` and no place is left."""
    end = work.sizes.buckets.places
    work, (clock,) = work.peek(present, "uses", work.order_word(CLOCK))
    full = clock >= end

    def one(w: T, local: tuple[Scalar, Scalar]) -> tuple[T, tuple[Scalar, Scalar]]:
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


def _path(work: T, present: Scalar, place: Scalar) -> tuple[T, tuple[Scalar, ...]]:
    levels = range(len(work.sizes.buckets.order_levels))
    return work.peek(present, "uses", *(work.leaf_word(level, place >> (5 * level + 5)) for level in levels))


def _set(work: T, present: Scalar, place: Scalar) -> T:
    place = jnp.maximum(place, 0)
    work, words = _path(work, present, place)
    return _write_words(work, present, place, [word | _bit(place, level) for level, word in enumerate(words)])


def _clear(work: T, present: Scalar, place: Scalar) -> T:
    place = jnp.maximum(place, 0)
    work, words = _path(work, present, place)
    rest, emptied = [], jnp.bool_(True)
    for level, word in enumerate(words):
        rest.append(jnp.where(emptied, word & ~_bit(place, level), word))
        emptied = emptied & (rest[-1] == 0)
    return _write_words(work, present, place, rest)


def _bit(place: Scalar, level: int) -> Scalar:
    return jnp.left_shift(jnp.int32(1), (place >> (5 * level)) & 31)


def _write_words(work: T, present: Scalar, place: Scalar, words: Sequence[Scalar]) -> T:
    for level, word in enumerate(words):
        work = work.write_if(present, "uses", word, work.leaf_word(level, place >> (5 * level + 5)))
    return work

"""Eviction: whole keys leave in order of use, or chains of the prefix tree from its oldest leaves, until enough blocks
did."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from hkv.dialects.rtp_llm.rules import prefix_tree
from hkv.dialects.rtp_llm.rules.parameters import CacheField, View
from hkv.dialects.rtp_llm.rules.shape import Shape
from hkv.state import item_table, leaves, recency, role_counts, tree
from hkv.state.loops import Scalar, loop, peek
from hkv.state.nodes import PASS, Node
from hkv.state.pooled import Counter, Item, PoolCounter, Role
from hkv.state.pooled_workspace import PooledWorkspace

WRITES = (*item_table.WRITES, *prefix_tree.WRITES)
"""Arrays that eviction writes."""

ANY_GROUP = -1


class Wanted(NamedTuple):
    """Blocks to evict.

    Attributes:
      group: keys with a block in this group leave, and only its blocks are counted; `ANY_GROUP` for all.
      least: blocks.
      keep: whether the blocks keep their references; keys and blocks are reported then.
    """

    group: Scalar
    least: Scalar
    keep: Scalar


def select(work: PooledWorkspace, view: View, wanted: Wanted) -> tuple[PooledWorkspace, Scalar, Scalar]:
    """Takes keys that are not resident out until enough blocks left (RTP-LLM `selectAndEvict[ForGroup]`).

    Under a prefix tree with a leaf whole chains leave; before them blocks of a group that may lose them alone, and then
    nothing else. Without one, the least recently used keys.

    Returns:
      The workspace, how many blocks and how many keys left.
    """
    if not work.sizes.nodes:
        return _by_use(work, view, wanted)
    work, (place, _) = leaves.first_from(work, wanted.least > 0, jnp.int32(0))
    chained = place < work.sizes.buckets.places
    bit = jnp.right_shift(view.whole(CacheField.ALONE), jnp.maximum(wanted.group, 0)) & 1
    loosened = chained & (wanted.group >= 0) & (bit != 0)
    work, alone = _alone(work, view, wanted._replace(least=jnp.where(loosened, wanted.least, 0)))
    chained_least = jnp.where(chained & (alone == 0), wanted.least, 0)
    work, blocks, keys = _by_chain(work, view, wanted._replace(least=chained_least))
    work, used, used_keys = _by_use(work, view, wanted._replace(least=jnp.where(chained, 0, wanted.least)))
    return work, alone + blocks + used, keys + used_keys


def _by_use(work: PooledWorkspace, view: View, wanted: Wanted) -> tuple[PooledWorkspace, Scalar, Scalar]:
    """Takes the least recently used keys out, of a group those that it has a block under."""
    ring, group = work.ring, wanted.group
    work, (oldest,) = peek(
        wanted.least > 0, lambda w: (w.read("items", w.item(ring, Item.NEXT)),), work, ("items",), (ring,)
    )

    def body(w: PooledWorkspace, local: tuple[Scalar, ...]) -> tuple[PooledWorkspace, tuple[Scalar, ...]]:
        key, blocks, keys = local
        w, (after, flags, own) = peek(
            key >= 0,
            lambda v: (
                v.read("items", v.item(key, Item.NEXT)),
                v.read("items", v.item(key, Item.FLAGS)),
                v.read("items", v.cached(key, jnp.maximum(group, 0))),
            ),
            w,
            ("items",),
            (ring, 0, 0),
        )
        goes = ((flags & item_table.RESIDENT) == 0) & ((group < 0) | (own != 0))
        w, left = _remove(w, view, goes, key, wanted.keep)
        return w, (after, blocks + jnp.where(group < 0, left, goes), keys + goes)

    going = lambda c: (c[0] != ring) & (c[1] < wanted.least)  # noqa: E731
    work, (_, blocks, keys) = loop(going, body, work, (oldest, 0, 0), writes=WRITES)
    return work, blocks, keys


def _by_chain(work: PooledWorkspace, view: View, wanted: Wanted) -> tuple[PooledWorkspace, Scalar, Scalar]:
    """Takes chains out, each from its leaf up, the one with the oldest leaf first.

    For a group passes are made over the leaves that there are at the beginning of each; a chain goes if it has the
    group, or stands in the way of an ancestor that has it and below which nothing is resident. In a chain nothing is
    either, so one walk up answers both.
    """
    none, any_group = work.sizes.buckets.places, wanted.group < 0
    work = _begin_pass(work, wanted.least > 0)

    def one(w: PooledWorkspace, local: tuple[Scalar, ...]) -> tuple[PooledWorkspace, tuple[Scalar, ...]]:
        place, blocks, keys, progress, _ = local
        w, (place, leaf) = leaves.first_from(w, place >= 0, place)
        over = place == none
        w, listed = _is_listed(w, leaf)
        w, found = _has_above(w, leaf, wanted.group, ~over & listed & ~any_group)
        goes = ~over & (any_group | found)
        w, own, left = _take_chain(w, view, leaf, wanted, goes)
        w = _begin_pass(w, over & progress)
        following = jnp.where(any_group | over, 0, place + 1)
        return w, (following, blocks + own, keys + left, ~over & (progress | goes), ~over | progress)

    start = (0, 0, 0, False, True)
    work, local = loop(lambda c: (c[1] < wanted.least) & c[4], one, work, start, writes=WRITES)
    return work, local[1], local[2]


def _alone(work: PooledWorkspace, view: View, wanted: Wanted) -> tuple[PooledWorkspace, Scalar]:
    """Takes one block of the group from each chain, nearest to its leaf but never the leaf's; how many."""
    none = work.sizes.buckets.places
    work = _begin_pass(work, wanted.least > 0)

    def one(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        place, blocks = local
        w, (place, leaf) = leaves.first_from(w, place >= 0, place)
        w, listed = _is_listed(w, leaf)

        def climb(v: PooledWorkspace, at: tuple[Scalar, ...]) -> tuple[PooledWorkspace, tuple[Scalar, ...]]:
            node, _, _ = at
            above = tree.look_up(v, node)
            further = (above.parent != 0) & ~above.pinned & above.alone
            node = jnp.where(further, above.parent - 1, node)
            has = v.read("items", v.cached(prefix_tree.key_of(v, node), wanted.group)) != 0
            return v, (node, further & ~has, further & has)

        start = (leaf, (place != none) & listed, False)
        w, (node, _, found) = loop(lambda c: c[1], climb, w, start, reads=("nodes", "items"))
        w = _take_slot(w, view, found, prefix_tree.key_of(w, node), wanted.group)
        return w, (jnp.where(place == none, none, place + 1), blocks + found)

    work, (_, blocks) = loop(lambda c: (c[0] < none) & (c[1] < wanted.least), one, work, (0, 0), writes=WRITES)
    return work, blocks


def _begin_pass(work: PooledWorkspace, present: Scalar) -> PooledWorkspace:
    """Leaves that come from now on are not in the pass."""
    work, (number,) = peek(present, lambda w: (w.read("uses", w.order_word(PASS)),), work, ("uses",), (0,))
    return work.write_if(present, "uses", number + 1, work.order_word(PASS))


def _is_listed(work: PooledWorkspace, leaf: Scalar) -> tuple[PooledWorkspace, Scalar]:
    """True if a leaf was one when the pass began."""
    work, (born, number) = peek(
        leaf >= 0,
        lambda w: (w.read("nodes", w.node(leaf, Node.BORN)), w.read("uses", w.order_word(PASS))),
        work,
        ("nodes", "uses"),
        (0, 0),
    )
    return work, born != number


def _has_above(work: PooledWorkspace, leaf: Scalar, group: Scalar, enabled: Scalar) -> tuple[PooledWorkspace, Scalar]:
    """True if a group has a block under a leaf's key or one above it below which nothing is resident."""
    group = jnp.maximum(group, 0)

    def climb(w: PooledWorkspace, local: tuple[Scalar, ...]) -> tuple[PooledWorkspace, tuple[Scalar, ...]]:
        node, _, _ = local
        has = w.read("items", w.cached(prefix_tree.key_of(w, node), group)) != 0
        above = tree.look_up(w, node)
        further = ~has & (above.parent != 0) & above.free
        return w, (jnp.where(further, above.parent - 1, node), further, has)

    work, (_, _, found) = loop(lambda c: c[1], climb, work, (leaf, enabled, False), reads=("nodes", "items"))
    return work, found


def _take_chain(
    work: PooledWorkspace, view: View, leaf: Scalar, wanted: Wanted, enabled: Scalar
) -> tuple[PooledWorkspace, Scalar, Scalar]:
    """Takes a leaf's chain out, from its top down; how many blocks that count, and how many keys."""
    work, node = tree.top(work, enabled, leaf)
    group = jnp.maximum(wanted.group, 0)

    def one(w: PooledWorkspace, local: tuple[Scalar, ...]) -> tuple[PooledWorkspace, tuple[Scalar, ...]]:
        node, blocks, keys, _ = local
        key = prefix_tree.key_of(w, node)
        w, (child, own) = peek(
            node >= 0,
            lambda v: (v.read("nodes", v.node(node, Node.CHILD)), v.read("items", v.cached(key, group))),
            w,
            ("nodes", "items"),
            (0, 0),
        )
        w, left = _remove(w, view, node >= 0, key, wanted.keep)
        counted = jnp.where(wanted.group < 0, left, own != 0)
        return w, (jnp.maximum(child - 1, 0), blocks + counted, keys + 1, node != leaf)

    work, (_, blocks, keys, _) = loop(lambda c: c[3], one, work, (node, 0, 0, enabled), writes=WRITES)
    return work, blocks, keys


def _take_slot(work: PooledWorkspace, view: View, present: Scalar, key: Scalar, group: Scalar) -> PooledWorkspace:
    """Takes a group's block from a key, which counts as used in the order of keys and leaves if it has no other."""
    work, (block, *seen) = peek(
        present,
        lambda w: (w.read("items", w.cached(key, group)), *recency.look(w, key)),
        work,
        ("items",),
        (0,) * 4,
    )
    work = recency.use(work, present, present, key, seen)
    work = work.write_if(present, "items", 0, work.cached(key, group))
    work = role_counts.release(work, present, view.pool_of(group), block, jnp.int32(Role.CACHE))
    work, (evictions,) = peek(
        present, lambda w: (w.read("counters", w.counter(Counter.EVICTIONS)),), work, ("counters",), (0,)
    )
    work = work.write_if(present, "counters", evictions + 1, work.counter(Counter.EVICTIONS))

    def look(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        return w, (local[0] + 1, w.read("items", w.cached(key, local[0])) == 0)

    work, (_, empty) = loop(
        lambda c: (c[0] < view.num_groups) & c[1], look, work, (0, jnp.asarray(present)), reads=("items",)
    )
    return _remove(work, view, empty, key, jnp.bool_(False))[0]


def _remove(
    work: PooledWorkspace, view: View, present: Scalar, key: Scalar, keep: Scalar
) -> tuple[PooledWorkspace, Scalar]:
    """Takes a key out of the cache and the tree, if `present`; how many blocks left with it."""
    work = prefix_tree.remove(work, present, key)
    return item_table.remove(work, present, key, view.num_groups, view.pool_of, keep)


def make_room(
    work: PooledWorkspace, view: View, shape: Shape, count: Scalar, enabled: Scalar
) -> tuple[PooledWorkspace, Scalar]:
    """Evicts until a group's pool has `count` free blocks (RTP-LLM `ensureFreeBlocks`).

    Args:
      work: needs `WRITES` to write.
      view: the configuration.
      shape: the group.
      count: blocks.
      enabled: whether to do it; False is returned where not.

    Returns:
      The workspace, and whether there are so many. What was evicted stays evicted in either case.
    """

    def look(w: PooledWorkspace, present: Scalar) -> tuple[PooledWorkspace, Scalar]:
        w, (free,) = peek(
            present,
            lambda v: (v.read("counters", v.pool_counter(shape.pool, PoolCounter.FREE)),),
            w,
            ("counters",),
            (0,),
        )
        return w, free

    def body(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        free, _ = local
        w, left, _ = select(w, view, Wanted(shape.group, count - free, jnp.bool_(False)))
        w, free = look(w, left > 0)
        return w, (free, left > 0)

    work, free = look(work, enabled)
    work, (free, _) = loop(lambda c: (c[0] < count) & c[1], body, work, (free, enabled), writes=WRITES)
    return work, enabled & (free >= count)

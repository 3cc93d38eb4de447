"""Eviction: whole keys leave in order of use, or chains of the prefix tree from its oldest leaves, until enough blocks
did.

RTP-LLM `SharedBlockCache::selectAndEvict`, `selectAndEvictForGroup` and, over them, `ensureFreeBlocks`. A removed key
gives its blocks' cache references back in all groups, so that a pool gets free blocks by evicting for another one. With
a tree, a leaf is taken out with its entire chain, even if enough left already. The three rules (in order of use,
chains, blocks that leave alone) are states of one loop: removal is compiled once.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from hkv.dialects.rtp_llm.rules import prefix_tree
from hkv.dialects.rtp_llm.rules.parameters import CacheField, RtpView, Shape
from hkv.state import item_table, role_counts, tree
from hkv.state.loops import Scalar, loop, peek
from hkv.state.nodes import PASS, Node
from hkv.state.pooled import Counter, Item, PoolCounter, Role
from hkv.state.pooled_workspace import PooledWorkspace

WRITES = (*item_table.WRITES, *prefix_tree.WRITES)
"""Arrays that eviction writes."""

ANY_GROUP = -1


class Wanted(NamedTuple):
    """Blocks to evict: keys with a block in this group leave, and only its blocks are counted (`ANY_GROUP` for all);
    how many; whether they keep their references, and keys and blocks are reported."""

    group: Scalar
    least: Scalar
    keep: Scalar


class Walk(NamedTuple):
    """State of an eviction under a prefix tree.

    Attributes:
      alone, chained: the rule at work: blocks that leave alone, or chains; keys in order of use where neither is.
      place: where the search for the next leaf begins.
      inside: whether a chain is being taken out; leaf, node: its leaf, and the node that goes next.
      key: the next in order of use.
      blocks, keys: that left.
      progress: whether the pass over the leaves took anything out.
      more: whether there may be more to take.
    """

    alone: Scalar
    chained: Scalar
    place: Scalar
    inside: Scalar
    leaf: Scalar
    node: Scalar
    key: Scalar
    blocks: Scalar
    keys: Scalar
    progress: Scalar
    more: Scalar


def select(work: PooledWorkspace, view: RtpView, wanted: Wanted) -> tuple[PooledWorkspace, Scalar, Scalar]:
    """Takes keys that are not resident out until enough blocks left (RTP-LLM `selectAndEvict[ForGroup]`); how many
    blocks and keys.

    Under a prefix tree with a leaf whole chains leave; before them blocks of a group that may lose them alone, and then
    nothing else. Without one, the least recently used keys.
    """
    work, (oldest,) = peek(
        wanted.least > 0, lambda w: (w.read("items", w.item(w.ring, Item.NEXT)),), work, ("items",), (work.ring,)
    )
    if not work.sizes.nodes:
        return _by_use(work, view, wanted, oldest)
    work, (place, _) = tree.first_from(work, wanted.least > 0, jnp.int32(0))
    # Without a leaf (all pinned, or the tree is off) RTP-LLM falls back to the order of use.
    leafy = place < work.sizes.buckets.places
    # A bit for each group that may lose blocks alone.
    bit = jnp.right_shift(view.whole(CacheField.ALONE), jnp.maximum(wanted.group, 0)) & 1
    alone = leafy & (wanted.group >= 0) & (bit != 0)
    work = _begin_pass(work, leafy)
    walk = Walk(alone, leafy & ~alone, 0, False, 0, 0, oldest, 0, 0, False, leafy | (oldest != work.ring))

    def one(w: PooledWorkspace, local: tuple[Scalar, ...]) -> tuple[PooledWorkspace, tuple[Scalar, ...]]:
        return _take_next(w, view, wanted, Walk(*local))

    def going(local: tuple[Scalar, ...]) -> Scalar:
        at = Walk(*local)
        # A chain that was begun goes whole, even if enough blocks left before its end.
        return at.more & (at.inside | (at.blocks < wanted.least))

    work, local = loop(going, one, work, walk, writes=WRITES)
    return work, Walk(*local).blocks, Walk(*local).keys


def _by_use(
    work: PooledWorkspace, view: RtpView, wanted: Wanted, oldest: Scalar
) -> tuple[PooledWorkspace, Scalar, Scalar]:
    """Takes the least recently used keys out, of a group those that it has a block under."""
    ring = work.ring

    def body(w: PooledWorkspace, local: tuple[Scalar, ...]) -> tuple[PooledWorkspace, tuple[Scalar, ...]]:
        key, blocks, keys = local
        w, after, goes = _in_order_of_use(w, key, wanted.group, key >= 0)
        # A key leaves with the blocks of all groups: an item is never torn.
        w, left = _remove(w, view, goes, key, wanted.keep)
        return w, (after, blocks + jnp.where(wanted.group < 0, left, goes), keys + goes)

    going = lambda c: (c[0] != ring) & (c[1] < wanted.least)  # noqa: E731
    work, (_, blocks, keys) = loop(going, body, work, (oldest, 0, 0), writes=WRITES)
    return work, blocks, keys


def _in_order_of_use(
    work: PooledWorkspace, key: Scalar, group: Scalar, enabled: Scalar
) -> tuple[PooledWorkspace, Scalar, Scalar]:
    """The key that was used after this one, and whether this one goes."""
    work, (after, flags, own) = peek(
        enabled,
        lambda v: (
            v.read("items", v.item(key, Item.NEXT)),
            v.read("items", v.item(key, Item.FLAGS)),
            v.read("items", v.cached(key, jnp.maximum(group, 0))),
        ),
        work,
        ("items",),
        (work.ring, item_table.RESIDENT, 0),
    )
    # Resident keys are passed over, never taken: they stand in the order of use like all others.
    return work, after, ((flags & item_table.RESIDENT) == 0) & ((group < 0) | (own != 0))


def _take_next(work: PooledWorkspace, view: RtpView, wanted: Wanted, at: Walk) -> tuple[PooledWorkspace, Walk]:
    """Takes out what the rule at work says comes next, if anything: all rules in one trip, so that the removal, which
    is most of the program, is compiled once.

    Chains go each from its top down, the one with the oldest leaf first. For a group passes are made over the leaves
    that there are at the beginning of each; a chain goes if it has the group, or stands in the way of an ancestor that
    has it and below which nothing is resident. In a chain nothing is either, so one walk up answers both.
    """
    any_group, group = wanted.group < 0, jnp.maximum(wanted.group, 0)
    # One trip has three rules in it, of which flags let one act. Three loops would each compile the removal, half of
    # the program.
    seeks = at.alone | (at.chained & ~at.inside)
    work, (place, leaf) = tree.first_from(work, seeks, at.place)
    over = seeks & (place == work.sizes.buckets.places)
    work, listed = _is_listed(work, leaf)
    met = seeks & ~over & listed
    work, above, loses = _above_leaf(work, leaf, group, at.alone & met)
    work, empty = _take_slot(work, view, loses, prefix_tree.key_of(work, above), group)
    work, found = _has_above(work, leaf, group, at.chained & met & ~any_group)
    begins = at.chained & seeks & ~over & (any_group | found)
    # A chain is the leaf with all ancestors that have no other child: without them nothing could be reached below.
    work, top = tree.top(work, begins, leaf)
    leaf, node, taken = jnp.where(begins, leaf, at.leaf), jnp.where(begins, top, at.node), begins | at.inside
    held = work.cached(prefix_tree.key_of(work, node), group)
    work, (child, own) = work.peek_each(taken, ("nodes", work.node(node, Node.CHILD)), ("items", held))
    by_use = ~at.alone & ~at.chained
    work, after, goes = _in_order_of_use(work, at.key, wanted.group, by_use)
    key = jnp.where(by_use, at.key, prefix_tree.key_of(work, jnp.where(at.alone, above, node)))
    work, left = _remove(work, view, empty | taken | goes, key, wanted.keep)
    counted = jnp.where(any_group, left, (taken & (own != 0)) | goes)
    blocks = at.blocks + jnp.where(at.alone, loses, counted)
    # Blocks that leave alone come first; only if that freed nothing do chains go.
    chains_next = over & at.alone & (blocks == 0)
    # Another pass over the leaves that there are now, as long as the last one took something out.
    work = _begin_pass(work, chains_next | (over & at.chained & at.progress))
    return work, Walk(
        alone=at.alone & ~over,
        chained=at.chained | (over & at.alone),
        # For any group the oldest leaf is asked for anew each time; for one group the pass goes on behind the last
        # one.
        place=jnp.where(seeks, jnp.where(over | (any_group & at.chained), 0, place + 1), at.place),
        inside=taken & (node != leaf),
        leaf=leaf,
        node=jnp.where(taken, jnp.maximum(child - 1, 0), node),
        key=after,
        blocks=blocks,
        keys=at.keys + (taken | goes),
        progress=jnp.where(at.chained & seeks, ~over & (at.progress | begins), at.progress),
        more=jnp.where(by_use, after != work.ring, ~over | chains_next | (at.chained & at.progress)),
    )


def _begin_pass(work: PooledWorkspace, present: Scalar) -> PooledWorkspace:
    """Leaves that come from now on are not in the pass."""
    work, (number,) = work.peek(present, "uses", work.order_word(PASS))
    return work.write_if(present, "uses", number + 1, work.order_word(PASS))


def _is_listed(work: PooledWorkspace, leaf: Scalar) -> tuple[PooledWorkspace, Scalar]:
    """True if a leaf was one when the pass began."""
    places = ("nodes", work.node(leaf, Node.BORN)), ("uses", work.order_word(PASS))
    work, (born, number) = work.peek_each(leaf >= 0, *places)
    # A leaf that this pass made is for the next one: RTP-LLM walks over a snapshot.
    return work, born != number


def _has_above(work: PooledWorkspace, leaf: Scalar, group: Scalar, enabled: Scalar) -> tuple[PooledWorkspace, Scalar]:
    """True if a group has a block under a leaf's key or one above it below which nothing is resident."""

    def climb(w: PooledWorkspace, local: tuple[Scalar, ...]) -> tuple[PooledWorkspace, tuple[Scalar, ...]]:
        node, _, _ = local
        has = w.read("items", w.cached(prefix_tree.key_of(w, node), group)) != 0
        above = tree.look_up(w, node)
        # Only through ancestors below which nothing is resident: else taking them would leave something unreachable.
        further = ~has & (above.parent != 0) & above.free
        return w, (jnp.where(further, above.parent - 1, node), further, has)

    work, (_, _, found) = loop(lambda c: c[1], climb, work, (leaf, enabled, False), reads=("nodes", "items"))
    return work, found


def _above_leaf(
    work: PooledWorkspace, leaf: Scalar, group: Scalar, enabled: Scalar
) -> tuple[PooledWorkspace, Scalar, Scalar]:
    """The node of a leaf's chain above it, nearest to it, under whose key a group has a block; and whether there is.

    Keys are looked up as for a hit: each is the most recently used then, in the order of keys.
    """

    def climb(w: PooledWorkspace, local: tuple[Scalar, ...]) -> tuple[PooledWorkspace, tuple[Scalar, ...]]:
        node, _, _ = local
        above = tree.look_up(w, node)
        further = (above.parent != 0) & ~above.pinned & above.alone
        node = jnp.where(further, above.parent - 1, node)
        key = prefix_tree.key_of(w, node)
        w, (block, *seen) = w.peek(further, "items", w.cached(key, group), *item_table.neighbours(w, key))
        w = item_table.use(w, further, further, key, seen)
        return w, (node, further & (block == 0), further & (block != 0))

    start = (leaf, enabled, False)
    work, (node, _, found) = loop(lambda c: c[1], climb, work, start, reads=("nodes",), writes=("items",))
    return work, node, found


def _take_slot(
    work: PooledWorkspace, view: RtpView, present: Scalar, key: Scalar, group: Scalar
) -> tuple[PooledWorkspace, Scalar]:
    """Takes a group's block from a key, which is a change of the cache; whether the key has no other."""
    work, (block,) = work.peek(present, "items", work.cached(key, group))
    work = work.write_if(present, "items", 0, work.cached(key, group))
    work = role_counts.release(work, present, view.pool_of(group), block, jnp.int32(Role.CACHE))
    for counter in (Counter.EVICTIONS, Counter.VERSION):
        work, (count,) = work.peek(present, "counters", work.counter(counter))
        work = work.write_if(present, "counters", count + 1, work.counter(counter))

    def look(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        return w, (local[0] + 1, w.read("items", w.cached(key, local[0])) == 0)

    work, (_, empty) = loop(
        lambda c: (c[0] < view.num_groups) & c[1], look, work, (0, jnp.asarray(present)), reads=("items",)
    )
    return work, empty


def _remove(
    work: PooledWorkspace, view: RtpView, present: Scalar, key: Scalar, keep: Scalar
) -> tuple[PooledWorkspace, Scalar]:
    """Takes a key out of the cache and the tree, if `present`; how many blocks left with it."""
    work = prefix_tree.remove(work, present, key)
    return item_table.remove(work, present, key, view.num_groups, view.pool_of, keep)


def make_room(
    work: PooledWorkspace, view: RtpView, shape: Shape, count: Scalar, enabled: Scalar
) -> tuple[PooledWorkspace, Scalar]:
    """Evicts until a group's pool has `count` free blocks (RTP-LLM `ensureFreeBlocks`), if `enabled`; whether there are
    so many.

    What was evicted stays evicted in either case.
    """

    def look(w: PooledWorkspace, present: Scalar) -> tuple[PooledWorkspace, Scalar]:
        w, (free,) = w.peek(present, "counters", w.pool_counter(shape.pool, PoolCounter.FREE))
        return w, free

    def body(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        free, _ = local
        # Evicted blocks need not become free, as requests may hold them too. It is asked again until it is enough or
        # nothing leaves.
        w, left, _ = select(w, view, Wanted(shape.group, count - free, jnp.bool_(False)))
        w, free = look(w, left > 0)
        return w, (free, left > 0)

    work, free = look(work, enabled)
    work, (free, _) = loop(lambda c: (c[0] < count) & c[1], body, work, (free, enabled), writes=WRITES)
    return work, enabled & (free >= count)

"""Eviction: chains of the prefix tree from its oldest leaves, or single keys in order of use.

A chain leaves whole, from the root's end, and a key with the blocks of all groups; a group whose policy says so may
lose single blocks instead, which leave holes under their keys.
"""

from __future__ import annotations

from reference.dialects.rtp_llm.cache import remove, use
from reference.dialects.rtp_llm.pools import release
from reference.dialects.rtp_llm.records import Cache, Group, Key, Node, Role
from reference.dialects.rtp_llm.tree import end_of_chain, in_the_way
from reference.language import Text, clause

TEXT = Text(__name__)


def make_room(c: Cache, group: Group, count: int) -> bool:
    """Evicts until so many blocks of a group's pool are free; whether they are."""
    pool = group.pool
    while pool.free < count:
        clause("make-room", "KVCacheGroup::ensureFreeBlocks", "cached blocks leave for a request's sake")
        if evict(c, group, count - pool.free, 0) == 0:
            return False
    return True


def evict(c: Cache, group: Group, least: int, exports: int) -> int:
    """Lets keys leave until `least` blocks of a group are out, or of all groups, if it is None; how many left. If it
    `exports` them they are told, and keep their references.

    Where it is for a group, leaves are passed over in order of use, those that come up meanwhile in the next pass.
    """
    clause("evict", "SharedBlockCache::selectAndEvict")
    by_use, left, progress = c.leaves.oldest() is c.leaves.ends, 0, True
    alone = group is not None and group.alone and not by_use
    while progress and left < least:
        progress, walked, leaf = False, c.recent.oldest(), c.leaves.oldest()
        c.passes += 1
        while left < least:
            key: Key = None  # type: ignore[assignment]
            node: Node = None  # type: ignore[assignment]
            if by_use:
                if walked is c.recent.ends:
                    break
                if not walked.resident and (group is None or walked.blocks[group.at] > 0):
                    key = walked
                walked = c.recent.newer[walked]
            else:
                leaf = c.leaves.oldest() if group is None else next_leaf(c, leaf)
                if leaf is c.leaves.ends:
                    break
                end = end_of_chain(leaf)
                if alone:
                    key = inner(c, leaf, end, group)  # type: ignore[arg-type]
                elif group is None or wanted(c, leaf, end, group):
                    node, key = end, end.key
                leaf = c.leaves.newer[leaf]
            while key is not None:
                progress = True
                if node is not None:
                    node = node.child
                left += leave(c, key, group, alone, exports)  # type: ignore[arg-type]
                key = node.key if node is not None else None  # type: ignore[assignment]
        if alone:
            progress, alone = left == 0, False
    return left


def next_leaf(c: Cache, leaf: Node) -> Node:
    """The next leaf of a pass, from one on that may have left: its newer neighbour is known still."""
    while leaf is not c.leaves.ends and (not leaf.leaf or leaf.since == c.passes):
        leaf = c.leaves.newer[leaf]
    return leaf


def wanted(c: Cache, leaf: Node, end: Node, group: Group) -> bool:
    """True if a chain has a block of a group, or stands in the way of one that has."""
    clause("wanted-chain", "SharedBlockCache::selectAndEvictForGroup", "a chain leaves for the sake of a group")
    node = leaf
    while node.key.blocks[group.at] == 0 and node is not end:
        node = node.parent
    return node.key.blocks[group.at] > 0 or in_the_way(c, end, group.at)


def inner(c: Cache, leaf: Node, end: Node, group: Group) -> Key:
    """The key of a chain that loses a block of a group alone: the one nearest to its leaf, but never the leaf's; None
    if there is none. A key that is looked at counts as used."""
    clause("evict-alone", "SharedBlockCache::selectAndEvictForGroup")
    node = leaf
    while node is not end:
        node = node.parent
        use(c, node.key)
        if node.key.blocks[group.at] > 0:
            return node.key
    return None  # type: ignore[return-value]


def leave(c: Cache, key: Key, group: Group, alone: int, exports: int) -> int:
    """Takes a key out, or if `alone` its block of a group; how many blocks of the group left."""
    clause("leave", "SharedBlockCache::remove")
    count, remaining = 0, 0
    if exports and c.said < c.room:
        c.told_keys[c.said] = key
    for g in range(c.config.groups):
        block = key.blocks[g]
        if exports:
            tell(c, block)
        if block > 0 and alone and g != group.at:
            remaining += 1
        elif block > 0:
            key.blocks[g] = 0
            c.evictions += 1
            count += group is None or g == group.at
        if not exports:
            release(c, c.groups[g + 1].pool, block if key.blocks[g] == 0 else 0, Role.CACHE)
    if alone:
        c.version += 1
    if remaining == 0:
        remove(c, key)
    return count


def tell(c: Cache, number: int) -> None:
    """Tells a number of an answer, if there is room."""
    if c.said < c.room:
        c.told[c.said] = number
    c.said += 1

"""The prefix tree over cached keys: which key builds on which, so that eviction takes leaves before what they stand on.

A node is a name of a key, one in each namespace. A child may come before its parent, which has it when it comes.
Children of a node that leaves are roots from then on, also when it returns, until they are entered again.
"""

from __future__ import annotations

from reference.dialects.rtp_llm.records import Cache, Key, Node
from reference.language import Text, clause

TEXT = Text(__name__)


def enter_name(c: Cache, key: Key, canonical: int, parent: Key) -> None:
    """Enters a name, or enters it anew under another parent; it counts as used."""
    clause("enter-name", "SharedBlockCache::PrefixTree::upsert")
    node = key.names[canonical]
    old: Node = node.parent
    above: Node = None  # type: ignore[assignment]
    detach(node)
    if parent is not None and parent is not key:
        above = parent.names[canonical]
        attach(node, above)
    node.present = 1
    use_name(c, node)
    # What is cached under the key may be resident, or of virtual blocks, since now: that is of its other name, too.
    for each in (key.names[0], key.names[1], old, above):
        consider(c, each)


def use_name(c: Cache, node: Node) -> None:
    """A name was used."""
    c.clock += 1
    node.used = c.clock
    if node.leaf:
        c.leaves.remove(node)
        c.leaves.put(node)


def remove_names(c: Cache, key: Key) -> None:
    """Takes every name of a key out; what builds on it are roots now."""
    clause("remove-names", "SharedBlockCache::PrefixTree::remove")
    first, second = key.names[0], key.names[1]
    above, over = first.parent, second.parent
    for node in (first, second):
        detach(node)
        child = node.child if node.present else None
        if node.present:
            node.present, node.child = 0, None  # type: ignore[assignment]
        while child is not None:
            after = child.after
            child.parent, child.before, child.after = None, None, None  # type: ignore[assignment]
            child = after
    for each in (first, second, above, over):
        consider(c, each)


def attach(node: Node, parent: Node) -> None:
    """Makes a root a child."""
    sibling = parent.child
    node.parent, node.before, node.after = parent, None, sibling  # type: ignore[assignment]
    if sibling is not None:
        sibling.before = node
    parent.child = node


def detach(node: Node) -> None:
    """Makes a child a root."""
    if node.parent is not None:
        if node.before is None:
            node.parent.child = node.after
        else:
            node.before.after = node.after
        if node.after is not None:
            node.after.before = node.before
        node.parent, node.before, node.after = None, None, None  # type: ignore[assignment]


# ------------------------------------------------------------------ leaves


def consider(c: Cache, node: Node) -> None:
    """A node may have become a leaf, or be none any more. New ones have been used longer ago than others seldom."""
    if node is not None and node.leaf != is_leaf(node):
        node.leaf = 1 - node.leaf
        if node.leaf:
            newer = c.leaves.ends
            while c.leaves.older[newer].used > node.used:
                newer = c.leaves.older[newer]
            c.leaves.put_behind(node, newer)
            node.since = c.passes
        else:
            c.leaves.remove(node)


def is_leaf(node: Node) -> bool:
    """True if eviction may begin at a node: nothing builds on it, and it may be evicted; of a key of virtual blocks,
    that name alone."""
    shadowed = node.key.canonical and not node.canonical
    return bool(node.present and node.child is None and not node.key.resident and not shadowed)


# ------------------------------------------------------------------ paths


def end_of_chain(leaf: Node) -> Node:
    """The root's end of a chain: a leaf, and upwards whatever stands on nothing else: non-resident parents with one
    child."""
    node = leaf
    while True:
        parent = node.parent
        if parent is None or not parent.present or parent.key.resident or parent.child.after is not None:
            break
        node = parent
    return node


def in_the_way(c: Cache, node: Node, at: int) -> bool:
    """True if a node above has a block of a group, of the place `at`, and nothing at it or below it is resident."""
    c.walks += 1
    walk = c.walks
    above = node.parent
    # Keys that repeat may build on each other in a circle.
    while above is not None and above.present and above.passed != walk:
        above.passed = walk
        if above.key.blocks[at] > 0 and is_evictable(c, above):
            return True
        above = above.parent
    return False


def is_evictable(c: Cache, node: Node) -> bool:
    """True if nothing at a node or below it is resident."""
    c.walks += 1
    node.seen, node.below = c.walks, None  # type: ignore[assignment]
    while node is not None:
        if node.key.resident:
            return False
        child, node = node.child, node.below
        while child is not None:
            if child.seen != c.walks:
                child.seen, child.below = c.walks, node
                node = child
            child = child.after
    return True

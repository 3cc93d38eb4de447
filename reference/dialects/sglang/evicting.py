"""Eviction: leaves leave whole, as a policy orders them; window pages and states leave by recency, wherever they are.

Full pages are needed by whatever comes after them, so they leave from the leaves up. A window's pages are not: those of
an inner node are freed alone, and a tombstone is left; so are states. If such a node is a leaf that nobody holds, it
leaves whole, its full pages with it, although these were not asked for.
"""

from __future__ import annotations

from reference.dialects.sglang.pools import available, of_kv
from reference.dialects.sglang.radix import consider, drop_state, tombstone
from reference.dialects.sglang.records import Cache, Mode, Node, Pool, Stage
from reference.language import Text, clause

TEXT = Text(__name__)


def evict(c: Cache, full: int, window: int, states: int, mode: int) -> None:
    """Lets nodes leave until there is enough of each pool, in the order of components, or nothing more may leave.

    Args:
      c: the cache.
      full: pages of full attention.
      window: pages of the window.
      states: states.
      mode: what there is to be enough of: `Mode`.
    """
    clause("evict", "UnifiedRadixCache.evict")
    c.mode, c.stage = mode, Stage.LEAVES
    c.full.due, c.swa.due, c.states.due = full, window, states
    c.full.freed, c.swa.freed, c.states.freed = 0, 0, 0
    while True:
        node = next_to_leave(c)
        if node is c.root:
            break
        if c.leaves.place[node] > 0:
            delete(c, node)
        else:
            c.evictions += 1
            if c.stage == Stage.WINDOW:
                tombstone(c, node)
            else:
                drop_state(c, node)


def next_to_leave(c: Cache) -> Node:
    """The node that leaves next, or loses its window pages or its state; the root if none does.

    Leaves go in their policy's order; of what the window and states have, what was used longest ago, wherever it is.
    What somebody holds is passed over before it is asked whether there is enough.
    """
    if c.stage == Stage.LEAVES:
        if c.leaves.count > 0 and not enough(c, c.full):
            return c.leaves.first()
        c.stage, c.walked = Stage.WINDOW, c.recent.oldest()
    if c.stage == Stage.WINDOW:
        if c.config.window:
            node = c.walked
            while node is not c.root and node.window_locks > 0:
                node = c.recent.newer[node]
            if node is not c.root and not enough(c, c.swa):
                c.walked = c.recent.newer[node]
                return node
        c.stage, c.walked = Stage.STATES, c.recent_states.oldest()
    if c.config.states:
        node = c.walked
        # A tombstone with a state may have left with the last of what came after it.
        while node is not c.root and (node.state_locks > 0 or node.children < 0):
            node = c.recent_states.newer[node]
        if node is not c.root and not enough(c, c.states):
            c.walked = c.recent_states.newer[node]
            return node
    return c.root


def enough(c: Cache, pool: Pool) -> bool:
    """True if there is enough of a pool, at which the engine looks before every node."""
    if c.mode == Mode.ROOM:
        return available(pool) >= pool.due
    if c.config.alone:
        pool.due -= 1
        return pool.due < 0
    return pool.freed >= pool.due


def delete(c: Cache, leaf: Node) -> None:
    """Takes a leaf out and, where SGLang would strand it, a tombstone that nothing comes after any more."""
    gone = True
    while gone:
        leaf = remove(c, leaf)
        strands = c.defects.window_pressure_strands_full_slots
        gone = not strands and c.config.window and c.leaves.place[leaf] > 0 and not leaf.live


def remove(c: Cache, leaf: Node) -> Node:
    """Takes a leaf out with its pages; its parent."""
    clause("remove-leaf", "UnifiedTreeCore._remove_leaf_from_parent")
    if leaf.live:
        tombstone(c, leaf)
    if c.config.states and leaf.state > 0:
        drop_state(c, leaf)
    pages, parent, key = leaf.end - leaf.start, leaf.parent, leaf.first
    place = of_kv(c, c.full, pages)
    key.head = None  # type: ignore[assignment]
    for at in range(pages):
        c.full.put(place + at, key.page)
        key.page = 0
        key = key.next
    c.full.idle -= pages
    c.full.freed += pages
    c.full.left += pages
    c.evictions += 1
    leaf.children = -1  # no leaf any more
    parent.children -= 1
    for node in (leaf, parent):
        consider(c, node)
    leaf.parent = c.vacant
    c.vacant = leaf
    return parent

"""The radix tree: a node is a run of pages that somebody cached together, and a path from the root is a prefix.

Reading changes the tree: a match that ends inside a node splits it there. Each component of the model says at which
nodes it could resume a request: full attention anywhere, a window only where it has its pages for a whole window back,
or back to the root, states only where there is one. A node that lost its window's pages but not the full ones is a
*tombstone*; a request that computes its tokens again and enters them brings the window's pages back.
"""

from __future__ import annotations

from reference.dialects.sglang.pools import free_own, free_state, of_kv, window_page
from reference.dialects.sglang.records import UNBOUNDED, Cache, Node, Policy, Request, ceil
from reference.language import Text, clause

TEXT = Text(__name__)


def match(c: Cache, request: Request, pages: int) -> tuple[Node, int, int]:
    """The longest cached prefix of a request's first `pages` keys: the last node at which every component could resume,
    its end, and the end of all that full attention has. It counts as a use."""
    clause("match", "UnifiedTreeCore.match_prefix")
    best, end, length, covered, partly = c.root, 0, 0, UNBOUNDED, False
    while end < pages and not partly:
        node = request.chain[end].head
        if node is None:
            break
        start = end
        end = shared(node, request, pages)
        partly = end < node.end
        if partly:
            node = split(c, node, end, request)
        # Up to the first tombstone nothing that the window reads is missing; after one, it must be there in full.
        covered = min(covered + (end - start) * c.config.page, UNBOUNDED)
        if c.config.window and not node.live:
            covered = 0
        elif covered >= c.config.window and (not c.config.states or node.state > 0):
            clause("resumable", "TreeComponent.create_match_validator", "a prefix at which every component can resume")
            best, length = node, end
    refresh(c, best)
    if c.config.states and best.state > 0:
        to_front(c, best)
    if pages > 0:
        use_path(c, request, length)
    return best, length, end


def shared(node: Node, request: Request, pages: int) -> int:
    """The position up to which a request's first `pages` keys are those of a node that it has reached."""
    at = node.start
    while at < node.end and at < pages and request.chain[at].page > 0:
        at += 1
    return at


def split(c: Cache, node: Node, at: int, request: Request) -> Node:
    """Makes two nodes of one: a new one of the pages before `at`, which is returned, and itself with the rest.

    Whoever holds the one holds both, but for the state, which is of the last page; the edge at which a window ends goes
    up with the older pages.
    """
    clause("split", "UnifiedTreeCore._split_node")
    upper = new_node(c)
    first, lower, parent = node.first, request.chain[at - 1].next, node.parent
    upper.parent, upper.first, upper.start, upper.end = parent, first, node.start, at
    upper.full_locks, upper.window_locks, upper.mark = node.full_locks, node.window_locks, node.mark
    upper.hits, upper.priority, upper.made, upper.live = node.hits, node.priority, node.made, node.live
    upper.children, upper.state, upper.state_locks = 1, 0, 0
    node.parent, node.first, node.start, node.mark = upper, lower, at, 0
    first.head, lower.head = upper, node
    if upper.live:
        c.recent.put_behind(upper, node)
    c.clock += 1
    upper.used = c.clock
    if c.defects.split_touches_suffix:
        clause("split-touches-suffix", "UnifiedTreeCore._split_node", "defect: a split makes the rest the newest leaf")
        use(c, node)  # as though it had been read: a leaf that nobody asked for outlives newer ones
    return upper


def insert(
    c: Cache, request: Request, pages: int, owned: int, entered: int, priority: int, state: int
) -> tuple[Node, int, int]:
    """Enters a request's pages; those that the tree has already are freed. The node that ends them, whether it took the
    state, and how many pages were known.

    Args:
      c: the cache.
      request: whose row and keys they are; of its first `slid` pages the window's are free.
      pages: how many are entered.
      owned: so many of them are the tree's own (`prev_prefix_len`).
      entered: so many this request has entered before; nodes in there are not hit again (`inserted_len`).
      priority: of the request.
      state: the state after them; 0 for none.
    """
    clause("insert", "UnifiedTreeCore.insert")
    node, start, took = c.root, 0, False
    c.clock += 1
    node.used = c.clock
    node.priority = max(node.priority, priority)
    while start < pages:
        child = request.chain[start].head
        if child is None:
            break
        end = shared(child, request, pages)
        partly = end < child.end
        if partly:
            child = split(c, child, end, request)
        child.priority = max(child.priority, priority)
        if not partly:
            use(c, child)
        taken = end
        if owned < end:
            taken = recover(c, child, request, start, end)
        free_own(c, request, max(start, owned), taken)
        if end > entered:
            hit(c, child)
        node, start = child, end
    known = start
    if start < pages:
        node = new_leaf(c, node, request, start, pages, priority)
        if c.config.states and state > 0:
            took = give_state(c, node, state, request)
        # SGLang takes the leaf's end for the beginning of what was new and the units of its last part.
        if start + node.end - node.start > entered:
            hit(c, node)
    elif c.config.states and state > 0 and pages > 0:
        took = give_state(c, node, state, request)
        use(c, node)
    refresh(c, node)
    return node, took, known


def hit(c: Cache, node: Node) -> None:
    """A request enters a node, anew or again."""
    node.hits += 1
    if c.leaves.policy in (Policy.LFU, Policy.SLRU) and c.leaves.place[node] > 0:
        c.leaves.put(node)


def recover(c: Cache, node: Node, request: Request, start: int, end: int) -> int:
    """Gives a tombstone the window pages that a request computed again, but for those it has freed meanwhile.

    What a request holds keeps its full pages, and the window's are mapped to them; else the node takes the request's
    full pages, too. The position from which on the request's pages are taken.
    """
    live = max(start, request.slid)
    if not c.config.window or node.live or live >= end:
        return end
    clause("recover", "SWAComponent.update_component_on_insert_overlap", "a tombstone has window pages again")
    if live > start:
        split(c, node, live, request)
    held = node.full_locks > 0
    place = of_kv(c, c.full, end - live)
    for at in range(live, end):
        key, fresh = request.chain[at], request.row[at]
        old, other = key.page, c.peer[fresh]
        if held:
            c.peer[fresh] = 0
            c.peer[old] = other
            c.full.put(place + at - live, fresh)
        else:
            key.page = fresh
            c.full.put(place + at - live, old)
    publish(c, node)
    return live


def new_leaf(c: Cache, parent: Node, request: Request, start: int, pages: int, priority: int) -> Node:
    """Enters the rest of a request's pages as a leaf.

    Its last part is no longer than a window needs: nodes are locked whole, and one window would hold a long prompt.
    """
    clause("new-leaf", "UnifiedTreeCore._add_new_node")
    leaf, first = new_node(c), request.chain[start]
    leaf.parent, leaf.first, leaf.start, leaf.end, leaf.children = parent, first, start, pages, 0
    leaf.live, leaf.full_locks, leaf.window_locks, leaf.state_locks, leaf.mark, leaf.state = 0, 0, 0, 0, 0, 0
    leaf.hits, leaf.priority, leaf.made = 0, priority, c.inserts
    c.inserts += 1
    c.clock += 1
    leaf.used = c.clock
    c.full.idle += pages - start
    c.full.came += pages - start
    for at in range(start, pages):
        key = request.chain[at]
        key.page = request.row[at]
        key.next = request.chain[at + 1]
    first.head = leaf
    parent.children += 1
    live = max(start, request.slid)
    if c.config.window and live < pages:
        clause("window-tail", "SWAComponent.commit_insert_component_data", "a new leaf is cut to what a window needs")
        for cut, lives in ((live, 0), (pages - ceil(c.config.window, c.config.page), 1)):
            if cut > leaf.start:
                upper = split(c, leaf, cut, request)
                if lives:
                    publish(c, upper)
        publish(c, leaf)
    for node in (parent, leaf):
        consider(c, node)
    return leaf


def new_node(c: Cache) -> Node:
    """A record that is no node's."""
    node = c.vacant
    c.vacant = node.parent
    return node


# ------------------------------------------------------------------ uses, and the order of leaves


def use(c: Cache, node: Node) -> None:
    """A node counts as used now."""
    c.clock += 1
    node.used = c.clock
    if c.leaves.place[node] > 0:
        c.leaves.put(node)


def use_path(c: Cache, request: Request, length: int) -> None:
    """A prefix of whole nodes counts as used, the root first, so that ancestors are older."""
    c.clock += 1
    c.root.used = c.clock
    at = 0
    while at < length:
        node = request.chain[at].head
        use(c, node)
        at = node.end


def consider(c: Cache, node: Node) -> None:
    """A node's children or locks changed: it is, or is not, among the leaves that may leave."""
    leaf = is_leaf(c, node)
    if leaf != (c.leaves.place[node] > 0):
        c.leaves.rank[node] = c.leaves.ranked(node) if leaf else 0
        c.leaves.toggle(node)


def is_leaf(c: Cache, node: Node) -> bool:
    """True if nothing comes after a node, and nobody holds any part of it."""
    held = node.full_locks > 0 or node.window_locks > 0 or node.state_locks > 0
    return node is not c.root and node.children == 0 and not held


# ------------------------------------------------------------------ window pages and states of nodes


def refresh(c: Cache, node: Node) -> None:
    """Window pages behind a position come to the front, the nearest foremost, a window and a page back."""
    if c.config.window:
        passed, front = 0, c.root
        while node is not c.root and passed < c.config.window + c.config.page:
            if node.live:
                c.recent.remove(node)
                c.recent.put_behind(node, front)
                front = node
            passed += (node.end - node.start) * c.config.page
            node = node.parent


def publish(c: Cache, node: Node) -> None:
    """A node has window pages, and is the one used last."""
    clause("publish", "SWAComponent.set_device_value")
    node.live = 1
    c.recent.put(node)
    pages = node.end - node.start
    c.swa.came += pages
    if node.window_locks > 0:
        c.swa.held += pages
    else:
        c.swa.idle += pages


def tombstone(c: Cache, node: Node) -> None:
    """Takes from a node the window pages that nobody holds; a state without its window is of no use, and goes, too."""
    clause("tombstone", "SWAComponent.evict_component")
    pages = node.end - node.start
    place = of_kv(c, c.swa, pages)
    key = node.first
    for at in range(pages):
        c.swa.put(place + at, window_page(c, key.page))
        c.peer[key.page] = 0
        key = key.next
    node.live = 0
    c.recent.remove(node)
    c.swa.freed += pages
    c.swa.left += pages
    c.swa.idle -= pages
    if c.config.states and node.state > 0:
        drop_state(c, node)


def give_state(c: Cache, node: Node, state: int, request: Request) -> bool:
    """Gives a node a state, if it has none; either way it counts as one that was used. Whether the node took it."""
    clause("give-state", "MambaComponent.commit_insert_component_data")
    took = node.state == 0
    if took:
        node.state = state
        c.recent_states.put(node)
        c.states.came += 1
        if node.state_locks > 0:
            c.states.held += 1
        else:
            c.states.idle += 1
        thin_states(c, node, request)
    else:
        to_front(c, node)
    return took


def to_front(c: Cache, node: Node) -> None:
    """A node's state is the one used last."""
    c.recent_states.remove(node)
    c.recent_states.put(node)


def drop_state(c: Cache, node: Node) -> None:
    """Takes from a node its state, which nobody holds."""
    clause("drop-state", "MambaComponent.evict_component")
    free_state(c, node.state)
    node.state = 0
    c.recent_states.remove(node)
    c.states.freed += 1
    c.states.left += 1
    c.states.idle -= 1


def thin_states(c: Cache, tail: Node, request: Request) -> None:
    """Drops states nearest the root where a path has more than it may; not those that are held or branched from."""
    if c.config.most_states > 0:
        clause("thin-states", "MambaComponent._cap_path_states", "a path has no more states than it may")
        count, node = 0, tail
        while node is not c.root:
            count += node.state > 0
            node = node.parent
        excess, at = count - c.config.most_states, 0
        while excess > 0 and at < tail.start:
            node = request.chain[at].head
            at = node.end
            if node.state > 0 and node.state_locks == 0 and node.children == 1:
                drop_state(c, node)
                excess -= 1

"""The radix tree: a node is a run of pages that somebody cached together, and a path from the root is a prefix.

Reading changes the tree: a match that ends inside a node splits it there. Each component of the model says at which
nodes it could resume a request: full attention anywhere, a window only where it has its slots for a whole window back,
or back to the root. A node that lost its window's slots but not the full ones is a *tombstone*; a request that computes
its tokens again and inserts them brings the window's slots back.

After SGLang 0.5.23, `unified_cache/unified_tree_core.py` and `components/swa.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterator
from typing import NamedTuple, TypeAlias

from hkv.dialects.sglang.config import FULL, MAMBA, SPLIT_TOUCHES_SUFFIX, SWA, WINDOW_UNTOLD, SGLangConfig
from reference.dialects.sglang.key import Key
from reference.dialects.sglang.pool import Pools

Time: TypeAlias = tuple[int, int]
"""A reading of the tree's clock; nodes of one path that are used together count as used the earlier, the higher."""


@dataclasses.dataclass(eq=False)
class TreeNode:
    """A run of whole pages.

    Attributes:
      key: its units.
      parent: the node before it; None for the root.
      full: slots of the full pool, one a unit.
      window: slots of the window's pool, one a unit; None for a tombstone.
      used: time of its last use.
      made: time at which it was entered; a split leaves it as it is in both parts.
      priority: the highest of the requests that entered it.
      hits: requests that entered it or entered it again.
      state: the state after its last unit, or None.
      full_locks: requests that hold its full slots.
      window_locks: requests whose window reaches into it.
      state_locks: requests that hold its state.
      mark: name of the edge at which such a window ends here, which unlocking looks for; None if none ever did.
      children: the nodes after it, by their first page.
    """

    key: Key
    parent: TreeNode | None
    full: list[int]
    window: list[int] | None
    used: Time
    made: int
    priority: int = 0
    hits: int = 0
    full_locks: int = 0
    window_locks: int = 0
    state: int | None = None
    state_locks: int = 0
    mark: int | None = None
    children: dict[Hashable, TreeNode] = dataclasses.field(default_factory=dict)

    def path(self) -> Iterator[TreeNode]:
        """The node and those before it, the root left out, nearest first."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def slots(self) -> list[int]:
        """Full slots of the whole prefix that ends with it."""
        return [slot for each in reversed(list(self.path())) for slot in each.full]

    def walk(self) -> Iterator[TreeNode]:
        """The node and all that come after it."""
        yield self
        for child in self.children.values():
            yield from child.walk()


class PrefixMatch(NamedTuple):
    """Prefix of a key that is cached.

    Attributes:
      node: the last node at which every component could resume.
      length: units up to there.
      full_length: units that full attention alone could resume at.
    """

    node: TreeNode
    length: int
    full_length: int

    @property
    def branch(self) -> int | None:
        """Length at which the next request would find more, if this one entered its window's slots there."""
        return self.full_length if self.full_length > self.length else None


class Inserted(NamedTuple):
    """Outcome of an insert: the node that ends it, whether the tree took the state that was given, and of how many
    units it had nodes before."""

    node: TreeNode
    took_state: bool
    known: int


class Told:
    """Pages, and states, published as events since the last time, by component.

    SGLang tells of full attention alone. A split tells nothing, and neither does a request that brings known tokens.
    """

    def __init__(self, config: SGLangConfig) -> None:
        self._config = config
        self.came = dict.fromkeys(config.components, 0)
        self.left = dict.fromkeys(config.components, 0)

    def stored(self, component: str, node: TreeNode) -> None:
        """A component of a node is there."""
        self._count(self.came, component, node)

    def removed(self, component: str, node: TreeNode) -> None:
        """A component of a node is there no more."""
        self._count(self.left, component, node)

    def take(self) -> tuple[dict[str, int], dict[str, int]]:
        """Nodes that came and left since the last call."""
        taken = self.came, self.left
        self.came, self.left = dict.fromkeys(self.came, 0), dict.fromkeys(self.left, 0)
        return taken

    def _count(self, counts: dict[str, int], component: str, node: TreeNode) -> None:
        if component == FULL or WINDOW_UNTOLD not in self._config.bugs:
            counts[component] += 1 if component == MAMBA else len(node.key) // self._config.page_size


class RadixTree:
    """SGLang's `UnifiedRadixCache` as far as a tree goes.

    Args:
      config: the cache's configuration.
      pools: where the slots come from and go back to.

    Attributes:
      root: a node without units, which never leaves.
      recent: nodes with window slots, most recently used first (`lru_lists[SWA]`).
      recent_states: nodes with a state, in the same order.
      told: published as events.
      evictions: times that a node left, or lost its window's slots or its state, to make room.
    """

    def __init__(self, config: SGLangConfig, pools: Pools) -> None:
        self.config, self.pools = config, pools
        self._clock = 0
        self.root = TreeNode(Key((None, None), ()), None, [], None, self.now(), self._clock)
        self.recent: list[TreeNode] = []
        self.recent_states: list[TreeNode] = []
        self.told = Told(config)
        self.evictions = 0

    def now(self) -> Time:
        """The next reading of the clock."""
        self._clock += 1
        return self._clock, 0

    def nodes(self) -> list[TreeNode]:
        """All nodes but the root."""
        return list(self.root.walk())[1:]

    def ledgers(self) -> dict[str, tuple[int, int]]:
        """Tokens, and states, that nobody holds and that somebody does, by component (`component_evictable_size_`,
        `component_protected_size_`)."""
        nodes = self.nodes()
        has = {
            FULL: [(len(node.full), node.full_locks) for node in nodes],
            SWA: [(len(node.window or ()), node.window_locks) for node in nodes],
            MAMBA: [(node.state is not None, node.state_locks) for node in nodes],
        }
        return {
            name: (sum(size for size, locks in has[name] if not locks), sum(size for size, locks in has[name] if locks))
            for name in self.config.components
        }

    def match(self, key: Key) -> PrefixMatch:
        """The longest cached prefix of a key (`match_prefix`); counts as a use of it."""
        key = key.whole_pages(self.config.page_size)
        if not key:
            return PrefixMatch(self.root, 0, 0)
        node, best, end, length, covered = self.root, self.root, 0, 0, math.inf
        while end < len(key) and (child := node.children.get(self._first(key[end:]))):
            shared = child.key.shared(key[end:], self.config.page_size)
            partly = shared < len(child.key)
            node = self.split(child, shared) if partly else child
            end += shared
            # Up to the first tombstone nothing that the window reads is missing; after one, it must be there in full.
            covered = 0 if self.is_tombstone(node) else covered + shared
            stateless = self.config.states is not None and node.state is None
            if not self.is_tombstone(node) and covered >= (self.config.window or 0) and not stateless:
                best, length = node, end
            if partly:
                break
        self._refresh(best)
        if best.state is not None:
            _to_front(self.recent_states, best)
        clock, _ = self.now()
        for above, each in enumerate([*best.path(), self.root]):
            each.used = (clock, -above)
        return PrefixMatch(best, length, end)

    def split(self, node: TreeNode, length: int) -> TreeNode:
        """Makes two nodes of one: a new one of its first units, which is returned, and itself with the rest.

        Whoever holds the one holds both, but for the state, which is of the last unit; and the edge at which a window
        ends goes up with the older units. SGLang gives
        the rest a new time, too, as though it had been read; a leaf that nobody asked for then outlives newer ones.
        """
        window = None if node.window is None else node.window[:length]
        upper = dataclasses.replace(
            node,
            key=node.key[:length],
            full=node.full[:length],
            window=window,
            used=self.now(),
            state=None,
            state_locks=0,
            children={},
        )
        assert node.parent is not None
        node.parent.children[self._first(upper.key)] = upper
        node.key, node.full, node.parent, node.mark = node.key[length:], node.full[length:], upper, None
        upper.children[self._first(node.key)] = node
        if node.window is not None:
            node.window = node.window[length:]
            self.recent.insert(self.recent.index(node) + 1, upper)
        if SPLIT_TOUCHES_SUFFIX in self.config.bugs:
            node.used = self.now()
        return upper

    def insert(
        self,
        key: Key,
        slots: list[int],
        *,
        owned: int = 0,
        evicted: int = 0,
        counted: int = 0,
        priority: int = 0,
        state: int | None = None,
    ) -> Inserted:
        """Enters a key with the full slots of its units (`insert`); slots that the tree has already are freed.

        Args:
          key: units; those that fill no page are left out.
          slots: a full slot a unit.
          owned: so many of them are the tree's own (`prev_prefix_len`).
          evicted: of so many the window's slots have been freed (`swa_evicted_seqlen`); whole pages.
          counted: so many this request has entered before; nodes in there are not hit again (`inserted_len`).
          priority: of the request.
          state: the state after the last unit, where layers have states.
        """
        key = key.whole_pages(self.config.page_size)
        node, start = self.root, 0
        node.used, node.priority = self.now(), max(node.priority, priority)
        while start < len(key) and (child := node.children.get(self._first(key[start:]))):
            shared = child.key.shared(key[start:], self.config.page_size)
            if shared < len(child.key):
                child = self.split(child, shared)
            else:
                child.used = self.now()
            child.priority = max(child.priority, priority)
            end = start + shared
            taken = self._recover(child, start, slots[start:end], evicted) if owned < end else end
            self._give_back_duplicates(slots, max(start, owned), taken, evicted)
            child.hits += end > counted
            node, start = child, end
        if start == len(key):
            took = bool(key) and state is not None and self._take_state(node, state)
            self._refresh(node)
            return Inserted(node, took, start)
        used = self.now()
        leaf = TreeNode(key[start:], node, slots[start : len(key)], None, used, used[0], priority)
        node.children[self._first(leaf.key)] = leaf
        self.told.stored(FULL, leaf)
        if self.config.window is not None:
            self._enter_window(leaf, start, evicted)
        if state is not None:
            leaf.state = state
            self.recent_states.insert(0, leaf)
            self.told.stored(MAMBA, leaf)
            self._thin_states(leaf)
        self._refresh(leaf)
        # The engine takes the leaf's end for the beginning of what was new and the units of its last part.
        leaf.hits += start + len(leaf.key) > counted
        return Inserted(leaf, state is not None, start)

    def tombstone(self, node: TreeNode) -> None:
        """Takes a node's window slots from it; a state without its window is of no use, and goes, too."""
        self.pools.give_back_window(node.full)
        node.window = None
        self.recent.remove(node)
        self.told.removed(SWA, node)
        if node.state is not None:
            self.drop_state(node)

    def drop_state(self, node: TreeNode) -> None:
        """Takes a node's state from it."""
        assert self.pools.states is not None
        assert node.state is not None
        self.pools.states.give_back([node.state])
        node.state = None
        self.told.removed(MAMBA, node)
        self.recent_states.remove(node)

    def delete(self, leaf: TreeNode) -> TreeNode:
        """Takes a leaf out, with its slots: the full ones go back first. Returns its parent."""
        self.pools.full.give_back(leaf.full)
        if leaf.window is not None:
            self.tombstone(leaf)
        if leaf.state is not None:
            self.drop_state(leaf)
        assert leaf.parent is not None
        del leaf.parent.children[self._first(leaf.key)]
        self.told.removed(FULL, leaf)
        return leaf.parent

    def _recover(self, node: TreeNode, start: int, slots: list[int], evicted: int) -> int:
        """Gives a tombstone the window's slots that a request computed again, but for those it has freed meanwhile.

        What a request holds keeps its full slots, and the window's are mapped to them; else the node takes the
        request's full slots, too. Returns the position from which on the request's slots are taken.
        """
        end, live = start + len(slots), max(start, evicted)
        if not self.is_tombstone(node) or live >= end:
            return end
        if live > start:
            self.split(node, live - start)
        fresh = slots[live - start :]
        if node.full_locks:
            self.pools.move_window(fresh, node.full)
            self.pools.full.give_back(fresh)
        else:
            self.pools.full.give_back(node.full)
            node.full = fresh
        self._publish(node)
        return live

    def _give_back_duplicates(self, slots: list[int], start: int, end: int, evicted: int) -> None:
        """Frees a request's slots that the tree has no use for; below `evicted` only the full ones are left."""
        if start < end:
            live = min(max(start, evicted), end)
            self.pools.full.give_back(slots[start:live])
            self.pools.give_back(slots[live:end])

    def _enter_window(self, leaf: TreeNode, start: int, evicted: int) -> None:
        """Gives a new leaf its window slots, and splits it so that its last part is no longer than a window needs.

        A request locks nodes whole: without the second split it would hold the slots of a long prompt for one window.
        """
        assert self.config.window is not None
        live, size = max(start, evicted), self.config.page_size
        if live >= start + len(leaf.key):
            return
        if live > start:
            self.split(leaf, live - start)
        tail = -(-self.config.window // size) * size
        if len(leaf.key) > tail:
            self._publish(self.split(leaf, len(leaf.key) - tail))
        self._publish(leaf)

    def _take_state(self, node: TreeNode, state: int) -> bool:
        """Gives an old node a state, if it has none; either way it counts as used."""
        took = node.state is None
        if took:
            node.state = state
            self.recent_states.insert(0, node)
            self.told.stored(MAMBA, node)
        else:
            _to_front(self.recent_states, node)
        node.used = self.now()
        if took:
            self._thin_states(node)
        return took

    def _thin_states(self, tail: TreeNode) -> None:
        """Drops states nearest the root where a path has more than it may; not those that are held or branched from."""
        holders = [node for node in tail.path() if node.state is not None]
        excess = len(holders) - self.config.most_states if self.config.most_states > 0 else 0
        for node in reversed(holders[1:]):
            if excess > 0 and not node.state_locks and len(node.children) == 1:
                self.drop_state(node)
                excess -= 1

    def _publish(self, node: TreeNode) -> None:
        node.window = [self.pools.window_of[slot] for slot in node.full]
        self.recent.insert(0, node)
        self.told.stored(SWA, node)

    def _refresh(self, node: TreeNode) -> None:
        """Window slots behind a position come to the front, the nearest foremost, a window and a page back."""
        window, place, passed = self.config.window, 0, 0
        if window is None:
            return
        for each in node.path():
            if passed >= window + self.config.page_size:
                return
            if each.window is not None:
                self.recent.remove(each)
                self.recent.insert(place, each)
                place += 1
            passed += len(each.key)

    def is_tombstone(self, node: TreeNode) -> bool:
        """True if the window's slots of a node are gone."""
        return self.config.window is not None and node.window is None

    def _first(self, key: Key) -> Hashable:
        return key.first_page(self.config.page_size)


def _to_front(order: list[TreeNode], node: TreeNode) -> None:
    order.remove(node)
    order.insert(0, node)

"""Eviction: leaves leave whole, as a policy orders them; window slots and states leave by recency, wherever they are.

Full slots are needed by whatever comes after them, so they leave from the leaves up. A window's slots are not: those of
an inner node are freed alone, and a tombstone is left; so are states. If such a node is a leaf that nobody holds, it
leaves whole, its full slots with it, although these were not asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

from hkv.dialects.sglang.config import FULL, MAMBA, STRANDS_FULL, SWA
from reference.dialects.sglang.tree import RadixTree, TreeNode

ORDERS: Mapping[str, Callable[[TreeNode], Any]] = {
    "lru": lambda node: node.used,
    "mru": lambda node: (-node.used[0], -node.used[1]),
    "fifo": lambda node: node.made,
    "filo": lambda node: -node.made,
    "lfu": lambda node: node.hits,
    "slru": lambda node: node.hits >= 2,
    "priority": lambda node: node.priority,
}
"""By which of its properties a leaf leaves before another; the smaller one first, and of equals the longer unused."""


def leaves(tree: RadixTree) -> list[TreeNode]:
    """Nodes that may leave: nothing comes after them, and nobody holds them (`_is_device_leaf`)."""
    nodes = (node for node in tree.nodes() if not node.children)
    return [node for node in nodes if not (node.full_locks or node.window_locks or node.state_locks)]


def evict(tree: RadixTree, wanted: Mapping[str, int]) -> dict[str, int]:
    """Frees so many tokens of each component, or as many as there are; how many it freed (`evict`).

    What leaves for full attention's sake counts for the window, too.
    """
    return _Eviction(tree).run(lambda name, freed: freed >= wanted.get(name, 0))


def evict_for(tree: RadixTree, tokens: int = 0, states: int = 0) -> None:
    """Evicts until there is room for so many tokens in each pool, and states, or nothing more may leave.

    The engine looks at the pool after every node. It counts what it frees of what was lacking, too, which comes to the
    same: a node's slots are whole pages (`evict_for_alloc`).
    """
    due = {FULL: tokens, SWA: tokens, MAMBA: states}
    _Eviction(tree).run(lambda name, freed: tree.pools.available[name] >= due[name])


def evict_steps(tree: RadixTree, component: str, steps: int) -> None:
    """Lets so many nodes leave for one component's sake, or as many as may (`evict_device_next_node`)."""
    left = steps

    def enough(name: str, freed: int) -> bool:
        nonlocal left
        left -= name == component
        return name != component or left < 0

    _Eviction(tree).run(enough)


class _Eviction:
    """One eviction of a tree, and what it freed so far."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._freed = dict.fromkeys(tree.config.components, 0)

    def run(self, enough: Callable[[str, int], bool]) -> dict[str, int]:
        """Frees each component's slots, in their order, until there is enough of it."""
        while not enough(FULL, self._freed[FULL]) and (found := leaves(self._tree)):
            self._delete(min(found, key=lambda node: (ORDERS[self._tree.config.policy](node), node.used)))
        if SWA in self._freed:
            held = {node for node in self._tree.recent if node.window_locks}
            self._walk(SWA, self._tree.recent, held, enough)
        if MAMBA in self._freed:
            held = {node for node in self._tree.recent_states if node.state_locks}
            self._walk(MAMBA, self._tree.recent_states, held, enough)
        return self._freed

    def _walk(
        self, name: str, order: list[TreeNode], held: Container[TreeNode], enough: Callable[[str, int], bool]
    ) -> None:
        """From what was used longest ago on; what is held is passed over."""
        for node in reversed(list(order)):
            # A tombstone with a state may have left with the last of what came after it.
            if node in held or node not in order:
                continue
            if enough(name, self._freed[name]):
                return
            if node in leaves(self._tree):
                self._delete(node)
                continue
            if name == SWA:
                self._freed[SWA] += len(node.key)
            if node.state is not None:
                self._freed[MAMBA] += 1
            (self._tree.tombstone if name == SWA else self._tree.drop_state)(node)
            self._tree.evictions += 1

    def _delete(self, leaf: TreeNode) -> None:
        self._freed[FULL] += len(leaf.key)
        if leaf.window is not None:
            self._freed[SWA] += len(leaf.key)
        if leaf.state is not None:
            self._freed[MAMBA] += 1
        parent = self._tree.delete(leaf)
        self._tree.evictions += 1
        # In SGLang a tombstone that nothing comes after any more stays, though no request can resume at it.
        if (
            STRANDS_FULL not in self._tree.config.bugs
            and parent in leaves(self._tree)
            and self._tree.is_tombstone(parent)
        ):
            self._delete(parent)

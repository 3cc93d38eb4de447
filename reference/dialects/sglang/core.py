"""The tree alone, as SGLang's cache drives it behind `UnifiedTreeCoreInterface`.

Whoever drives it owns the pools: slots come with what is entered, and it says which of them leave. It is asked to let
nodes leave one by one, since SGLang's cache looks at its pools after each. Nodes and locks have names, given by the one
who first sees them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hkv.dialects.sglang.config import SGLangConfig
from hkv.errors import OperationError
from reference.dialects.sglang.eviction import evict_steps
from reference.dialects.sglang.key import Key, Namespace
from reference.dialects.sglang.locks import Locks, Receipt
from reference.dialects.sglang.pool import Pools, SlotPool
from reference.dialects.sglang.tree import Inserted, PrefixMatch, RadixTree, TreeNode


class _NotedPool(SlotPool):
    """A pool that belongs to somebody else: slots given back are noted."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self._noted: list[int] = []

    def give_back(self, slots: Sequence[int]) -> None:
        self._noted += slots

    def take(self) -> list[int]:
        """Notes since the last call."""
        noted, self._noted = self._noted, []
        return noted


class _NotedPools(Pools):
    """Pools that belong to somebody else; a window's slots are noted by the full ones that are mapped to them."""

    def __init__(self, config: SGLangConfig) -> None:
        super().__init__(config)
        self.noted = _NotedPool(), _NotedPool(), _NotedPool()
        self.full, _, states = self.noted
        self.states = None if config.states is None else states

    def give_back_window(self, slots: Sequence[int]) -> None:
        if self.window is not None:
            self.noted[1].give_back(slots)
            for slot in slots:
                self.window_of.pop(slot, None)


class TreeCore:
    """A tree whose pools are somebody else's (`UnifiedTreeCore`).

    Attributes:
      config: the cache's configuration.
      tree: the tree.
      nodes: nodes by the names that the driver gave them.
      receipts: locks that are held, by name.
    """

    def __init__(self, config: SGLangConfig) -> None:
        self.config = config
        self.reset()

    def reset(self) -> None:
        """Forgets everything; nothing is given back (`reset`)."""
        self._pools = _NotedPools(self.config)
        self.tree, self._locks = RadixTree(self.config, self._pools), Locks(self.config.window)
        self.nodes: dict[int, TreeNode] = {}
        self.receipts: dict[str, Receipt] = {}

    def match(self, tokens: Sequence[int], namespace: Namespace) -> PrefixMatch:
        """As `RadixTree.match`."""
        return self.tree.match(Key.of(tokens, namespace, eagle=self.config.bigrams))

    def insert(
        self, tokens: Sequence[int], namespace: Namespace, slots: list[int], window: Sequence[int], **given: Any
    ) -> Inserted:
        """Enters a key.

        Args:
          tokens: to be entered.
          namespace: of their key.
          slots: a full slot a unit.
          window: the window slot that each of those is mapped to, 0 for none; empty where there is no window.
          **given: as of `RadixTree.insert`.
        """
        mapped = {slot: other for slot, other in zip(slots, window, strict=False) if other}
        for slot in slots:
            self._pools.window_of.pop(slot, None)
        self._pools.window_of.update(mapped)
        return self.tree.insert(Key.of(tokens, namespace, eagle=self.config.bigrams), slots, **given)

    def lock(self, id: str, name: int) -> bool:
        """Holds a node and what is before it; true if the window's part ends before the root (`inc_lock_ref`)."""
        if name not in self.nodes:
            raise OperationError("node", name, "a node that was named")
        if id in self.receipts:
            raise OperationError("id", id, "a name that no lock has")
        receipt = self.receipts[id] = self._locks.lock(self.nodes[name])
        return receipt.mark is not None

    def unlock(self, id: str) -> None:
        """Undoes a lock (`dec_lock_ref`)."""
        self._locks.unlock(self._receipt(id))
        del self.receipts[id]

    def release_window(self, id: str) -> None:
        """Gives back a lock's part on the window (`dec_swa_lock_only`)."""
        self._locks.release_window(self._receipt(id))

    def release_state(self, id: str) -> None:
        """Gives back a lock's part on the state alone (`dec_lock_ref`, all else left out)."""
        self._locks.release_state(self._receipt(id))

    def leave(self, component: str, steps: int) -> None:
        """Lets so many nodes leave for a component's sake, or as many as may (`evict_device_next_node`)."""
        evict_steps(self.tree, component, steps)
        alive = set(self.tree.root.walk())
        self.nodes = {name: node for name, node in self.nodes.items() if node in alive}

    def take_returned(self) -> tuple[list[int], ...]:
        """Slots given back since the last call: full slots, full slots whose window's were, and states."""
        return tuple(pool.take() for pool in self._pools.noted)

    def _receipt(self, id: str) -> Receipt:
        try:
            return self.receipts[id]
        except KeyError:
            raise OperationError("id", id, "a lock that is held") from None

"""The prefix cache of all groups: one item a key, with a block for each group that has one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hkv.dialects.rtp_llm.config import NULL
from hkv.errors import OperationError
from reference.state.lru import Lru
from tests.rtp_llm.witness.pool import CACHE, BlockPool
from tests.rtp_llm.witness.prefix_tree import DEFAULT, GPU_CP_CANONICAL, NAMESPACES, Name, PrefixTree
from tests.rtp_llm.witness.resource import ROOT, Dependency


@dataclasses.dataclass
class Item:
    """Blocks cached under one key.

    Attributes:
      key: the key.
      blocks: for each group, the block or `NULL`.
      resident: it is never evicted.
      matchable: for each group, whether a lookup may find its block.
      namespace: the namespace of `dependency`.
      dependency: the key that it builds on.
    """

    key: int
    blocks: list[int]
    resident: bool
    matchable: list[bool]
    namespace: int
    dependency: Dependency

    def has(self, group: int) -> bool:
        """True if the group has a block here."""
        return self.blocks[group] != NULL

    @property
    def count(self) -> int:
        """Blocks over all groups."""
        return sum(block != NULL for block in self.blocks)


class SharedBlockCache:
    """RTP-LLM `SharedBlockCache`: keys to blocks, in order of use and, if asked for, in a prefix tree.

    A block in the cache holds a cache reference of its group's pool, taken by `put`. Evicting is in
    `tests.rtp_llm.witness.eviction`; what evicts gives the references back.

    Args:
      pools: for each group, the pool it draws from.
      tree: whether eviction follows the prefix tree.
      independent: groups that may lose blocks alone.

    Attributes:
      version: number of changes to the cache, less one: -1 before the first.
      evictions: blocks that were evicted so far.
    """

    def __init__(self, pools: Sequence[BlockPool], *, tree: bool, independent: frozenset[int] = frozenset()) -> None:
        self.pools = list(pools)
        self.items: Lru[int, Item] = Lru()
        self.tree = PrefixTree(self._evictable) if tree else None
        self.independent = independent
        self.version = -1
        self.evictions = 0

    def put(
        self,
        key: int,
        blocks: Sequence[int],
        *,
        resident: bool = False,
        namespace: int = DEFAULT,
        dependency: Dependency = ROOT,
        matchable: Sequence[bool] | None = None,
    ) -> None:
        """Enter blocks under a key. A slot that is filled keeps its block; only holes are filled.

        Residence stays once it is there, and a dependency among virtual blocks is not replaced by one of another
        namespace.

        Args:
          key: the key.
          blocks: for each group, a block or `NULL`; groups beyond the cache's are ignored.
          resident: never evict the key.
          namespace: one of `prefix_tree.NAMESPACES`.
          dependency: the key that it builds on.
          matchable: for each group, whether a lookup may find the block; all, if left out.
        """
        if namespace not in NAMESPACES:
            raise OperationError("namespace", namespace, f"one of {NAMESPACES}")
        groups = len(self.pools)
        blocks = [*blocks[:groups], *[NULL] * (groups - len(blocks))]
        item = self.items.get(key)
        if item is None:
            shown = [True] * groups if matchable is None else list(matchable[:groups])
            item = Item(key, [NULL] * groups, resident, shown, namespace, dependency)
            self._forget(self.items.put(key, item))
            self._fill(item, blocks)
            changed = True
        else:
            changed = self._update(item, blocks, resident, namespace, dependency, matchable)
        if changed or item.resident:
            self.version += 1
        if self.tree is not None:
            self.tree.upsert((namespace, key), dependency, item.resident)

    def match(self, key: int) -> list[int]:
        """The blocks of a key, one a group; empty for an unknown key. A known one counts as used."""
        item = self.items.get(key)
        if item is None:
            return []
        if self.tree is not None:
            self.tree.touch(key)
        return list(item.blocks)

    def match_group(self, key: int, group: int) -> int:
        """The block of a key in one group, or `NULL`. The key counts as used even if the group has none."""
        blocks = self.match(key)
        item = self.items.peek(key)
        return blocks[group] if item is not None and item.matchable[group] else NULL

    def peek(self, key: int) -> Item | None:
        """The item of a key, or None; nothing counts as used."""
        return self.items.peek(key)

    def remove(self, key: int) -> Item:
        """Take a key and all its names out. Its references stay: the caller has them now.

        Raises:
          OperationError: there is no such key.
        """
        if key not in self.items:
            raise OperationError("key", key, "a cached key")
        if self.tree is not None:
            self.tree.remove(key)
        return self.items.remove(key)

    def release(self, blocks: Sequence[int]) -> None:
        """Give the cache references of an item's blocks back, one a group."""
        for pool, block in zip(self.pools, blocks, strict=True):
            if block != NULL:
                pool.release([block], CACHE)

    def _forget(self, left: tuple[int, Item] | None) -> None:
        """A key had to leave for a new one, as the cache knows too many."""
        if left is not None:
            if self.tree is not None:
                self.tree.remove(left[0])
            self.release(left[1].blocks)

    def _update(
        self,
        item: Item,
        blocks: Sequence[int],
        resident: bool,
        namespace: int,
        dependency: Dependency,
        matchable: Sequence[bool] | None,
    ) -> bool:
        before = (list(item.blocks), item.resident, list(item.matchable), item.namespace, item.dependency)
        item.resident = item.resident or resident
        filled = self._fill(item, blocks)
        for group, block in enumerate(blocks):
            shown = filled[group] if matchable is None else block != NULL and matchable[group]
            item.matchable[group] = item.matchable[group] or shown
        if not (item.namespace == GPU_CP_CANONICAL and namespace != GPU_CP_CANONICAL):
            item.namespace, item.dependency = namespace, dependency
        return before != (item.blocks, item.resident, item.matchable, item.namespace, item.dependency)

    def _fill(self, item: Item, blocks: Sequence[int]) -> list[bool]:
        """Put blocks into holes, with a cache reference each; which were put."""
        filled = [old == NULL and new != NULL for old, new in zip(item.blocks, blocks, strict=True)]
        for group, (pool, block) in enumerate(zip(self.pools, blocks, strict=True)):
            if filled[group]:
                item.blocks[group] = block
                pool.reference([block], CACHE)
        return filled

    def _evictable(self, name: Name) -> bool:
        item = self.items.peek(name[1])
        if item is None or item.resident:
            return False
        return not (item.namespace == GPU_CP_CANONICAL and name[0] != GPU_CP_CANONICAL)

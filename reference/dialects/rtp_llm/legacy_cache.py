"""RTP-LLM's older cache, one block for each key and group, with an LRU for each of the pairs."""

from __future__ import annotations

import dataclasses

from hkv.dialects.rtp_llm.config import NULL
from reference.state.lru import Lru


@dataclasses.dataclass(frozen=True)
class LegacyItem:
    """One cached block.

    Attributes:
      block: the block.
      resident: it is never evicted.
    """

    block: int
    resident: bool


class BlockCache:
    """RTP-LLM `BlockCache`, which `SharedBlockCache` replaces. It holds no references; its user does."""

    def __init__(self) -> None:
        self.items: Lru[tuple[int, int], LegacyItem] = Lru()

    def put(self, key: int, group: int, block: int, resident: bool = False) -> bool:
        """Enter a block; False when the key has one in that group already, which is only touched."""
        if self.items.get((key, group)) is not None:
            return False
        self.items.put((key, group), LegacyItem(block, resident))
        return True

    def match(self, key: int, group: int = 0) -> int:
        """The block of a key in a group, or NULL."""
        item = self.items.get((key, group))
        return NULL if item is None else item.block

    def pop(self, count: int) -> list[int]:
        """Take out up to `count` blocks, least recently used first, resident ones never."""
        chosen = [pair for pair in self.items if not self._item(pair).resident][: max(count, 0)]
        return [self.items.remove(pair).block for pair in chosen]

    def select_and_evict(self, least: int) -> dict[int, list[int]]:
        """Take out whole keys, least recently used first, until `least` blocks are out; always one key at least.

        Returns:
          For each key, its blocks. Keys with any resident block stay.
        """
        evicted: dict[int, list[int]] = {}
        for key in list(dict.fromkeys(key for key, _ in self.items)):
            if evicted and sum(map(len, evicted.values())) >= least:
                break
            pairs = [pair for pair in self.items if pair[0] == key]
            if not any(self._item(pair).resident for pair in pairs):
                evicted[key] = [self.items.remove(pair).block for pair in pairs]
        return evicted

    def _item(self, pair: tuple[int, int]) -> LegacyItem:
        item = self.items.peek(pair)
        assert item is not None
        return item

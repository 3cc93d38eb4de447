"""A map that remembers which of its keys was used least recently."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Lru(Generic[K, V]):
    """Keys in order of use. `put` and `get` use a key; `peek` and `in` do not.

    Args:
      capacity: most keys; one more makes the least recently used leave.
    """

    def __init__(self, capacity: int = 10**7) -> None:
        self.capacity = capacity
        self._items: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: K) -> bool:
        return key in self._items

    def __iter__(self) -> Iterator[K]:
        """Keys, least recently used first."""
        return iter(self._items)

    def put(self, key: K, value: V) -> tuple[K, V] | None:
        """Set a key's value and make it the most recently used.

        Returns:
          What had to leave for a new key, or None.
        """
        left = None
        if key not in self._items and len(self._items) >= self.capacity:
            left = self._items.popitem(last=False)
        self._items[key] = value
        self._items.move_to_end(key)
        return left

    def get(self, key: K) -> V | None:
        """A key's value, which makes it the most recently used; None if it is not there."""
        if key not in self._items:
            return None
        self._items.move_to_end(key)
        return self._items[key]

    def peek(self, key: K) -> V | None:
        """A key's value, or None; the order stays."""
        return self._items.get(key)

    def remove(self, key: K) -> V:
        """Take a key out, which must be in."""
        return self._items.pop(key)

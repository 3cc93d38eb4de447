"""Dense numbers for prefix keys, so that compiled caches can look them up without hashing. Host-only."""

from __future__ import annotations

from collections.abc import Hashable, Iterable


class Interner:
    """Numbers keys in the order in which they come, from 0 on; a key's number never changes.

    Attributes:
      keys: the key of each number.
      places: for each number, which hash block of its request the key ends, from 0; a key names a whole prefix, so this
        is the same in every request.
    """

    def __init__(self) -> None:
        self.keys: list[Hashable] = []
        self.places: list[int] = []
        self._numbers: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self.keys)

    def number(self, key: Hashable, place: int) -> int:
        """The number of a key that ends hash block `place`."""
        found = self._numbers.setdefault(key, len(self.keys))
        if found == len(self.keys):
            self.keys.append(key)
            self.places.append(place)
        return found

    def numbers(self, keys: Iterable[Hashable], first: int = 0) -> list[int]:
        """The numbers of consecutive keys of one request, the first of which ends hash block `first`."""
        return [self.number(key, place) for place, key in enumerate(keys, first)]

    def find(self, key: Hashable) -> int | None:
        """The number of a key, or None for one that never came."""
        return self._numbers.get(key)

"""A set of 128-bit names in one NumPy table with open addressing: thousands are looked up and entered at once."""

from __future__ import annotations

import numpy as np

FREE = -1
"""Value of `_owners` for an empty place."""


class Visited:
    """Names that were seen.

    Args:
      places: size of the table at first, a power of two; it doubles when it is half full.
    """

    def __init__(self, places: int = 1 << 16) -> None:
        self._names = np.zeros((places, 2), np.uint64)
        self._owners = np.full(places, FREE, np.int64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, names: np.ndarray) -> np.ndarray:
        """Enters names, and says which of them are new; of equal ones, the first.

        Args:
          names: uint32[n, 4].

        Returns:
          bool[n].
        """
        while 2 * (self._count + len(names)) > len(self._owners):
            self._grow()
        return self._enter(np.ascontiguousarray(names).view(np.uint64).reshape(-1, 2))

    def _enter(self, words: np.ndarray) -> np.ndarray:
        mask = np.uint64(len(self._owners) - 1)
        new = np.zeros(len(words), bool)
        left = np.arange(len(words))
        place = ((words[:, 0] ^ (words[:, 1] >> np.uint64(17))) & mask).astype(np.int64)
        while len(left):
            at = place[left]
            empty = self._owners[at] == FREE
            claims = left[empty][::-1]
            self._owners[place[claims]] = claims  # of several claims on a place, the last written is the first of them
            won = claims[self._owners[place[claims]] == claims]
            self._names[place[won]] = words[won]
            new[won] = True
            known = np.all(self._names[at] == words[left], axis=1)
            left = left[~known]
            place[left[~empty[~known]]] += 1
            place[left] &= np.int64(mask)
        self._count += int(new.sum())
        return new

    def _grow(self) -> None:
        words = self._names[self._owners != FREE]
        places = 2 * len(self._owners)
        self._names = np.zeros((places, 2), np.uint64)
        self._owners = np.full(places, FREE, np.int64)
        self._count = 0
        self._enter(words)

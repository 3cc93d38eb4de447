"""The id bitmap: which ids are free, handed out smallest first."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


class IdBitmap:
    """A set of ids that gives its smallest members first.

    Args:
      size: ids run from 0 up to, but not including, this.
      reserved: number of the first ids that are never in the set.
    """

    def __init__(self, size: int, reserved: int = 0) -> None:
        self._free = np.zeros(size, bool)
        self._free[reserved:] = True

    def __len__(self) -> int:
        return int(self._free.sum())

    def __contains__(self, id: int) -> bool:
        return bool(self._free[id])

    def __iter__(self) -> Iterator[int]:
        return iter(np.flatnonzero(self._free).tolist())

    def smallest(self, count: int) -> list[int]:
        """The `count` smallest ids, ascending; fewer if there are no more. They stay in the set."""
        return np.flatnonzero(self._free)[:count].tolist()

    def discard(self, id: int) -> None:
        """Take an id out, if it is in."""
        self._free[id] = False

    def add(self, id: int) -> None:
        """Put an id in."""
        self._free[id] = True

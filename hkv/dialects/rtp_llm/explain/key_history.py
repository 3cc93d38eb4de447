"""State of the blocks under a key: cached, evicted, never kept, or still with the request that computed them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

CACHED, EVICTED, NOT_KEPT, UNFINISHED, NEVER_SEEN = STATES = (
    "cached",
    "evicted",
    "not kept",
    "not finished",
    "never seen",
)
"""Values of `KeyHistory.absence`."""


class KeyHistory:
    """Follows keys from the request that computes them to the cache and out of it.

    Args:
      groups: number of groups.

    Attributes:
      duplicates: blocks that were not entered because another one was there under their key.
    """

    def __init__(self, groups: int) -> None:
        self.duplicates = 0
        self._entered: list[set[int]] = [set() for _ in range(groups)]
        self._inserted: set[int] = set()
        self._running: Counter[int] = Counter()

    def begin(self, keys: Iterable[int]) -> None:
        """A request got blocks for these keys."""
        self._running.update(keys)

    def end(self, keys: Iterable[int]) -> None:
        """A request gave back the blocks of these keys."""
        for key in keys:
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]

    def inserted(self, keys: Sequence[int], blocks: Sequence[Sequence[int]], cached: Sequence[Sequence[int]]) -> None:
        """A request's blocks were entered.

        Args:
          keys: the keys.
          blocks: for each group, the request's blocks, -1 for holes.
          cached: for each key, the blocks that the cache has under it now, one a group.
        """
        self._inserted.update(keys)
        for group, (entered, mine) in enumerate(zip(self._entered, blocks, strict=True)):
            for key, block, held in zip(keys, mine, cached, strict=False):
                if block > 0:
                    entered.add(key)
                    self.duplicates += held[group] not in (block, -1)

    def absence(self, group: int, key: int, *, cached: bool) -> str:
        """State of a key's block in a group: one of `STATES`.

        Args:
          group: the group.
          key: the key.
          cached: whether the cache has it.
        """
        if cached:
            return CACHED
        if key in self._entered[group]:
            return EVICTED
        if key in self._inserted:
            return NOT_KEPT
        return UNFINISHED if key in self._running else NEVER_SEEN

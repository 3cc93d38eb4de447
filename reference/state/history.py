"""Diagnosis of a miss: the reason why a key is not in the cache, by the outcome of its last registration."""

from __future__ import annotations

from reference.keys.views import Chain

REGISTERED = 1
RETIRED = 2
NOT_RETAINED = 3

NAMES = ("never seen", "evicted", "retired", "not retained")
"""Meaning of each code for a key that is not cached now."""


class History:
    """The last thing that happened to each key in each group; a diagnosis, which no decision reads.

    Codes of all groups of one prefix are packed into one int, two bits a group, for traces have millions of prefixes.
    """

    def __init__(self) -> None:
        self._codes: dict[Chain, int] = {}
        self._evictions: dict[tuple[int, Chain], tuple[int, int]] = {}

    def note(self, group: int, chain: Chain, code: int) -> None:
        """Remember that `chain` was `REGISTERED`, already `RETIRED`, or `NOT_RETAINED` in `group`."""
        shift = 2 * group
        self._codes[chain] = self._codes.get(chain, 0) & ~(3 << shift) | code << shift
        self._evictions.pop((group, chain), None)

    def evicted(self, group: int, chain: Chain, step: int, taker: int) -> None:
        """Remember that the last block of `chain` in `group` was handed out in a step, to another group or the same."""
        self._evictions[group, chain] = step, taker

    def eviction(self, group: int, chain: Chain) -> tuple[int, int] | None:
        """The step in which `chain` was last evicted from `group`, and the group that got its block; None if never."""
        return self._evictions.get((group, chain))

    def of(self, group: int, chain: Chain) -> int:
        """The last code noted, or 0."""
        return self._codes.get(chain, 0) >> 2 * group & 3

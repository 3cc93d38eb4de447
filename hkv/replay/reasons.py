"""State of the blocks that would take a hit further: each group's, and the protocol `HitReasons` of what tells them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

NOTHING = "nothing to find"
HAD = "had it"
NEVER_SEEN = "never seen"
UNFINISHED = "not finished"
EVICTED = "evicted"
RETIRED = "retired window"
NOT_RETAINED = "not retained"
NOT_SHARED = "never shared"
CACHING_OFF = "caching is off"

COMPLETE = frozenset((NOTHING, HAD, NOT_SHARED, CACHING_OFF))
"""Reasons of groups that lack nothing, or that nobody asks."""

NOT_COMPUTED = frozenset((NEVER_SEEN, UNFINISHED))
"""Reasons of groups whose blocks nobody has computed to the end."""


class Lacking(NamedTuple):
    """State of the blocks that one group needs at a boundary.

    Attributes:
      reason: `HAD` where all are there; else the reason why one of them is not, among the dialect's names.
      evicted: the step with work in which that block was evicted, the first being 2; 0 if it was not, or nobody knows.
      taker: the group that got it, or -1.
    """

    reason: str
    evicted: int = 0
    taker: int = -1


class HitReasons(Protocol):
    """Says what groups lack beyond a hit."""

    def lacking(self, keys: Sequence[int], hit: int, asked: int) -> tuple[int, list[Lacking]]:
        """State of each group's blocks, for a request that is about to be allocated its own.

        Returns:
          The furthest boundary up to `asked` whose blocks have been computed by anybody; and, one a group, what it
          lacks there, `NOTHING` where nothing was asked.
        """

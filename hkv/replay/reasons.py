"""Reasons why a cache hit ended where it did: those that every dialect has, and the protocol `HitReasons`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

WHOLE_PROMPT = "whole prompt"
WAITING = "waiting for another group"
NOT_SHARED = "never shared"
CACHING_OFF = "caching is off"
RETIRED = "retired window"
NEVER_SEEN = "never seen"
EVICTED = "evicted"
NOT_RETAINED = "not retained"
FELL_SHORT = "lookup fell short"


class GroupSearch(NamedTuple):
    """One group's side of a lookup: how far it could have gone alone, and what it lacked there. Lengths are tokens.

    Attributes:
      resumes: the furthest boundary, at least the hit, at which a request could have resumed, were this the only group.
      reason: why not at the one after it, among the dialect's names of reasons; `WHOLE_PROMPT` where there is none.
      computed: up to where the group's blocks had been computed by anybody.
      evicted: the step with work in which the block that was lacking had been evicted, the first being 2; 0 if it was
        not.
      taker: the group that got that block, or -1.
    """

    resumes: int
    reason: str
    computed: int
    evicted: int = 0
    taker: int = -1


class HitReasons(Protocol):
    """Says why a hit ended where it did."""

    def reasons(self, keys: Sequence[int], tokens: int, hit: int) -> list[str]:
        """One reason per group, for a request that is about to be allocated its blocks.

        Args:
          keys: the request's prefix keys.
          tokens: tokens the request has.
          hit: tokens that were found.
        """
        ...

    def searches(self, keys: Sequence[int], prompt: int, seen: int, hit: int) -> list[GroupSearch]:
        """Each group's side of the same lookup, up to where the prefixes seen before can have taken it.

        Args:
          keys: the request's prefix keys.
          prompt: tokens the request has.
          seen: tokens of it that an earlier request had too.
          hit: tokens that were found.

        Returns:
          One per group, or none where the dialect does not tell.
        """
        ...

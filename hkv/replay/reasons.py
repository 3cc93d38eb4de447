"""Reasons why a cache hit ended where it did: those that every dialect has, and the protocol `HitReasons`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

WHOLE_PROMPT = "whole prompt"
WAITING = "waiting for another group"
NOT_SHARED = "never shared"
CACHING_OFF = "caching is off"
RETIRED = "retired window"


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

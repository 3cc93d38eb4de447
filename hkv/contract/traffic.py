"""Random traffic: sources of decisions, moves, and configurations that are kept for what they reach."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from hkv.spec.layer import Draw, T

Choices = Draw
"""A source of decisions."""


class RandomChoices:
    """Decisions of a seeded pseudo-random generator: the same seed gives the same ones on every machine."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def chance(self, percent: int) -> bool:
        return self._random.random() * 100 < percent

    def pick(self, sequence: Sequence[T]) -> T:
        return self._random.choice(sequence)


class Moves(Protocol):
    """Random traffic that is made move by move."""

    def possible(self, move: str) -> bool:
        """True if a move can be made now."""
        ...

    def make(self, move: str) -> None:
        """Makes a move: draws what it needs, and has its operations performed."""


STEERED = "steered"
"""Feature of traffic under kept configurations."""


class KeptTraffic(NamedTuple):
    """A configuration, and the seed of the traffic that reached something rare under it."""

    header: Any
    seed: int

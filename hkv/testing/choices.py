"""Sources of decisions for random configurations and traffic."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Choices(Protocol):
    """A source of decisions. Small integers and early elements count as simple, for sources that can shrink."""

    def integer(self, low: int, high: int) -> int:
        """An integer from `low` to `high`, both included."""
        ...

    def chance(self, percent: int) -> bool:
        """True in about `percent` of 100 cases."""
        ...

    def pick(self, sequence: Sequence[T]) -> T:
        """One element of a sequence that has some."""
        ...


class RandomChoices:
    """Decisions of a seeded pseudo-random generator: the same seed gives the same ones on every machine.

    Args:
      seed: of Python's `random.Random`.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def chance(self, percent: int) -> bool:
        return self._random.random() * 100 < percent

    def pick(self, sequence: Sequence[T]) -> T:
        return self._random.choice(sequence)

"""The source of random decisions from which kinds draw layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Draw(Protocol):
    """A source of decisions. Small integers and early elements count as simple, for sources that can shrink."""

    def integer(self, low: int, high: int) -> int:
        """A number from `low` to `high`, both included."""
        ...

    def chance(self, percent: int) -> bool:
        """True in about `percent` of a hundred cases."""
        ...

    def pick(self, sequence: Sequence[T]) -> T:
        """One element of a sequence that has some."""
        ...

"""The source of random decisions from which kinds draw layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Draw(Protocol):
    """Source of random decisions (`hkv.contract.traffic.Choices`)."""

    def integer(self, low: int, high: int) -> int:
        """A number from `low` to `high`, both included."""
        ...

    def chance(self, percent: int) -> bool:
        """True in about `percent` of a hundred cases."""
        ...

    def pick(self, sequence: Sequence[Any]) -> Any:
        """One element of a sequence that has some."""
        ...

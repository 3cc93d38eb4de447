"""Moves of a dialect's state machine: traffic of which each move can be made by itself."""

from __future__ import annotations

from typing import Protocol


class Moves(Protocol):
    """Random traffic that is made move by move."""

    def possible(self, move: str) -> bool:
        """True if a move can be made now."""
        ...

    def make(self, move: str) -> None:
        """Makes a move: draws what it needs, and has its operations performed."""
        ...

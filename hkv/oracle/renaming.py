"""Comparison of two engines' block ids: exactly, or, if the dialect offers it, up to renaming of blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

States = Callable[[Any], tuple[Any, Any]]
"""Performs an operation that changes nothing on both engines, and answers what the right one and the tested one say."""


class SameNames:
    """Blocks are called what they are called: nothing is renamed. The base of every other way."""

    def operation(self, operation: Any, states: States) -> Any:
        """The operation as the tested engine has to hear it."""
        return operation

    def answer(self, want: Any, got: Any) -> Any:
        """The tested engine's answer in the names of the right one's."""
        return got

    def learn(self, operation: Any, states: States) -> None:
        """Takes note of what no answer tells, after an operation."""

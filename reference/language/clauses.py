"""Marks of a text: where a named clause stands, where an engine may choose, what hardly ever holds.

The plain run records clauses while somebody asks (`recording`); a lowered program knows nothing of them.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_told: contextvars.ContextVar[Callable[[str], Any] | None] = contextvars.ContextVar("clauses", default=None)
_chooses: contextvars.ContextVar[Callable[[str, Any], Any] | None] = contextvars.ContextVar("choices", default=None)


@dataclasses.dataclass(frozen=True)
class Clause:
    """A named clause of a text.

    Attributes:
      name: stable, unique in its text. symbol: of the engine's source, which it is the rule of; "" for none.
      meaning: what it says: the clause's own words, or the first sentence of its rule.
      rule: qualified name of the function in which it stands. file, line: where.
    """

    name: str
    symbol: str
    meaning: str
    rule: str
    file: str
    line: int


def clause(name: str, symbol: str = "", meaning: str = "") -> None:
    """Marks the clause that begins here, by its stable name and the engine's own symbol; the meaning is its rule's."""
    if told := _told.get():
        told(name)


def choice(name: str, value: T) -> T:
    """A value of which the engine may rightly take another: with `choosing`, the one that it took."""
    chooses = _chooses.get()
    return chooses(name, value) if chooses else value


def seldom(condition: T) -> T:
    """A condition that hardly ever holds: the lowered program jumps over what depends on it."""
    return condition


@contextlib.contextmanager
def recording(told: Callable[[str], Any]) -> Iterator[None]:
    """Tells the name of each clause that plain rules reach meanwhile."""
    token = _told.set(told)
    try:
        yield
    finally:
        _told.reset(token)


@contextlib.contextmanager
def choosing(chooses: Callable[[str, Any], Any]) -> Iterator[None]:
    """Asks, at each `choice` that plain rules reach meanwhile, for the value by the choice's name and the text's
    value."""
    token = _chooses.set(chooses)
    try:
        yield
    finally:
        _chooses.reset(token)

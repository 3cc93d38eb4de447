"""Values of a text while it is read: Python's where they are known, else numbers that a run will know."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

_serial = itertools.count()


class MismatchError(Exception):
    """Values that do not go together; whoever knows the place makes a `TextError` of it."""


class TextError(Exception):
    """A text uses what cannot be lowered; says where, and what was expected."""


class Num:
    """A number that a run will know, computed once; `serial` grows with time. boolean: it is a condition. among: the
    values that it may have, where they are known."""

    __slots__ = ("among", "boolean", "serial")

    def __init__(self, boolean: bool = False, among: tuple[int, ...] = ()) -> None:
        self.boolean, self.serial, self.among = boolean, next(_serial), among


@dataclasses.dataclass(frozen=True)
class Row:
    """A record of a table, by its number; None is number 0 of any, `table` "" where nothing says of which."""

    number: Any
    table: str


@dataclasses.dataclass(frozen=True)
class Path:
    """A part, a table or an array of the cache, by name; of a record's line, where it begins."""

    name: str
    base: Any = 0


NONE = Row(0, "")


def is_number(v: Any) -> bool:
    """True of one number, known or not."""
    return isinstance(v, Num | int)


def mapped(v: Any, f: Callable[[Any], Any]) -> Any:
    """A value of the same kind with other numbers."""
    if isinstance(v, Row):
        return Row(f(v.number), v.table)
    if isinstance(v, Path):
        return Path(v.name, f(v.base))
    if isinstance(v, tuple):
        return tuple(mapped(each, f) for each in v)
    return f(v) if is_number(v) else v


def matched(a: Any, b: Any, f: Callable[[Any, Any], Any]) -> Any:
    """A value of the kind of two others; its numbers are made of theirs."""
    if isinstance(a, Row) and isinstance(b, Row):
        return Row(f(a.number, b.number), one_table(a, b))
    if isinstance(a, Path) and isinstance(b, Path) and a.name == b.name:
        return Path(a.name, f(a.base, b.base))
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return tuple(matched(*pair, f) for pair in zip(a, b, strict=True))
    if is_number(a) and is_number(b):
        return f(a, b)
    if type(a) is type(b) and a == b:
        return a
    raise MismatchError(f"either of two values that are not alike: {told(a)} and {told(b)}")


def one_table(a: Row, b: Row) -> str:
    """The table of which two records are."""
    if a.table and b.table and a.table != b.table:
        raise MismatchError(f"a record of {a.table} and one of {b.table}")
    return a.table or b.table


def numbers(v: Any) -> list[Any]:
    """Numbers of a value, in order."""
    found = list[Any]()
    mapped(v, found.append)
    return found


def blank(v: Any) -> Any:
    """A value of a kind, before there is one."""
    return mapped(v, lambda _: 0)


def told(v: Any) -> str:
    """A value in an error."""
    if isinstance(v, Row):
        return f"a record of {v.table}" if v.table else "None"
    if isinstance(v, tuple):
        return f"({', '.join(map(told, v))})"
    return "a number" if isinstance(v, Num) else v.name or "the cache" if isinstance(v, Path) else repr(v)

"""Records, parts and collections: what the state of a cache is declared with.

A `Record` is a row of a `Table`; a field that holds a record is one or None. A `Part` is there once. Annotations are
the declaration: of a record its fields, of a part its scalars, collections and parts. A scalar or field is an `int`, or
a record. Fields have names of their own within a record; two records may have fields of one name.
"""

from __future__ import annotations

import functools
import typing
from typing import Any, TypeVar

NOTHING = -(2**31) + 1
"""A number that stands for none, where 0 and -1 are numbers like others."""

T = TypeVar("T")
K = TypeVar("K")


class Record:
    """A row of a table; its annotations are its fields."""


class Part:
    """Something that a cache has one of; its annotations are what it has."""


class Settings(Part):
    """A part that rules read and never write: a configuration, or which known defects of an engine are reproduced."""


class Array(list[T]):
    """Numbers or records by their place, from 0 on."""


class Line(list[T]):
    """An array that each record has."""


class Table(list[T]):
    """The records of a kind, from place 1 on; None is at place 0."""


class Checked(list[T]):
    """An array, line or table that refuses places below 0, which Python counts from the end."""

    def __getitem__(self, place: Any) -> Any:
        return super().__getitem__(self._checked(place))

    def __setitem__(self, place: Any, value: Any) -> None:
        super().__setitem__(self._checked(place), value)

    def _checked(self, place: Any) -> Any:
        if isinstance(place, int) and place < 0:
            raise IndexError(f"place {place}: expected one from 0 to {len(self) - 1}")
        return place


class Column(dict[K, T]):
    """A number or record for each record of a table, kept by whoever needs it: the place of a record in a heap, say."""

    def __init__(self, nothing: Any) -> None:
        super().__init__()
        self._nothing = nothing

    def __missing__(self, _: K) -> Any:
        return self._nothing


@functools.cache
def declared(kind: type) -> tuple[type, dict[str, Any]]:
    """A record's or part's class, and the kinds of what it declares by name; `Ring[Node]` has a `Node` for each `T`."""
    origin, given = typing.get_origin(kind) or kind, typing.get_args(kind)
    bound: dict[Any, Any] = {}
    for base in getattr(origin, "__orig_bases__", ()):
        names = getattr(typing.get_origin(base), "__parameters__", ())
        bound |= dict(zip(names, typing.get_args(base), strict=False))
    bound |= dict(zip(getattr(origin, "__parameters__", ()), given, strict=False))
    return origin, {name: _with(held, bound) for name, held in typing.get_type_hints(origin).items()}


def _with(held: Any, bound: dict[Any, Any]) -> Any:
    if isinstance(held, TypeVar):
        return bound.get(held, held)
    if arguments := typing.get_args(held):
        return typing.get_origin(held)[tuple(_with(each, bound) for each in arguments)]
    return held


def another(kind: type[Part], name: str) -> type[Part]:
    """A part like one that a cache has already: its records, and parts in it, are of classes of their own."""
    made: dict[Any, type] = {}

    def like(held: Any) -> Any:
        arguments = typing.get_args(held)
        origin = typing.get_origin(held) or held
        if arguments and not issubclass(origin, Part):
            return origin[tuple(map(like, arguments))]
        if not issubclass(origin, Record | Part):
            return held
        if held not in made:
            made[held] = type(f"{name}{origin.__name__}", (origin,), {"__annotations__": {}})
            made[held].__annotations__ |= {field: like(each) for field, each in declared(held)[1].items()}
        return made[held]

    return like(kind)


def is_a(held: Any, kind: type) -> bool:
    """True of something declared that is of a kind."""
    origin = typing.get_origin(held) or held
    return isinstance(origin, type) and issubclass(origin, kind)

"""Replays and engines held against each other: the first place at which they differ."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar, TypeAlias

import numpy as np

from hkv.replay.schedule import Recorder


class Difference(Exception):  # noqa: N818 - the answer of a check, not an error of the input
    """Two engines answered differently, in the `number`-th operation."""

    def __init__(self, number: int, operation: str, request: str, field: str, answers: dict[str, object]) -> None:
        self.number = number
        self.operation = operation
        self.request = request
        self.field = field
        self.answers = answers
        told = "; ".join(f"{name}: {_shorten(answer)}" for name, answer in answers.items())
        of = f" of request {request}" if request else ""
        super().__init__(f"operation {number}, {operation}{of}: {field} differs: {told}")


def compare_records(mine: Recorder, other: Recorder, names: tuple[str, str]) -> None:
    """Compares every request's result, what groups lacked for it among that, and every step."""
    for index in sorted(mine.requests.keys() | other.requests.keys()):
        compare(f"request {index}", mine.requests.get(index), other.requests.get(index), names)
    for field in dataclasses.fields(mine.steps):
        ours, theirs = getattr(mine.steps, field.name), getattr(other.steps, field.name)
        if ours != theirs:
            step = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
            at = min(len(ours), len(theirs)) if step is None else step
            compare(f"{field.name} of the {at + 1}th step with work", ours[at : at + 1], theirs[at : at + 1], names)


def compare_outcomes(mine: Any, other: Any, names: tuple[str, str]) -> None:
    """Compares two replays of one trace (`hkv.replay.run.Outcome`): records, counts, blocks over time."""
    compare_records(mine.recorder, other.recorder, names)
    for field in ("steps", "evictions"):
        compare(field, getattr(mine, field), getattr(other, field), names)
    for name, value in mine.extra.items():
        compare(name, value, other.extra[name], names)
    if mine.occupancy is not None and other.occupancy is not None:
        theirs = other.occupancy.columns()
        for name, column in mine.occupancy.columns().items():
            compare(f"{name} over time", column.tolist(), theirs[name].tolist(), names)


def compare(field: str, mine: object, other: object, names: tuple[str, str]) -> None:
    """Compares two answers."""
    if mine != other:
        raise Difference(0, "replay", "", field, dict(zip(names, (mine, other), strict=True)))


class Lockstep(abc.ABC):
    """An engine that performs every operation on two engines, and stops at the first answer that differs.

    Answers are the first engine's, as is every attribute that is not one of `operations`.
    """

    operations: ClassVar[tuple[str, ...]]

    def __init__(self, engine: Any, reference: Any, names: tuple[str, str]) -> None:
        self._engine, self._reference, self._names, self._number = engine, reference, names, 0

    @abc.abstractmethod
    def _parts(self, name: str, arguments: tuple[Any, ...], mine: Any, other: Any) -> Iterable[Part]:
        """Parts of the answers to an operation that are compared."""

    def __getattr__(self, name: str) -> Any:
        mine = getattr(self._engine, name)
        if name not in self.operations:
            return mine
        other = getattr(self._reference, name)

        def both(*arguments: Any) -> Any:
            answers = mine(*arguments), other(*arguments)
            self._number += 1
            for operation, request, field, *values in self._parts(name, arguments, *answers):
                if values[0] != values[1]:
                    told: dict[str, object] = dict(zip(self._names, values, strict=True))
                    raise Difference(self._number, operation, request, field, told)
            return answers[0]

        return both


Part: TypeAlias = tuple[str, str, str, object, object]
"""An operation, the request that it concerns or "", a field of its answer, and both engines' values of that."""


class Compared:
    """An engine whose answers are held against `ids`, integers that a compiled replay reported one after the other."""

    def __init__(self, engine: Any, ids: np.ndarray, names: tuple[str, str]) -> None:
        self._engine, self._ids, self._names = engine, ids, names
        self._place = self._number = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _read(self, count: int) -> list[int]:
        self._place += count
        return self._ids[self._place - count : self._place].tolist()

    def _differ(self, operation: str, request: str, field: str, *values: object) -> Difference:
        return Difference(self._number, operation, request, field, dict(zip(self._names, values, strict=True)))

    def check_all_compared(self) -> None:
        """Raises Difference where the compiled replay reported more, or less."""
        if self._place != len(self._ids):
            raise self._differ("replay", "", "integers reported", len(self._ids), self._place)


def _shorten(value: object, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."

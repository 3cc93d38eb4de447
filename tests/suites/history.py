"""Suites of histories: operations on one engine under watch, and the frame that plays, judges and shrinks them.

A run has `perform`, which raises `InvariantError` if an invariant does not hold; after an `EngineFailure`, of a defect
that the configuration names, nothing is judged. Legal operations are told by three methods: `fit` makes an operation
fit what came before it, None when it cannot be asked now; `in_order` says whether the history goes on at all when it
comes next; `note` takes note of an answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from hkv.contract.invariant import InvariantError
from hkv.contract.traffic import RandomChoices
from hkv.errors import EngineFailure, OperationError
from tests.suites.shrinking import Broken, Simpler, shrink
from tests.suites.suite import TOTALITY, Failure

Header = TypeVar("Header")
Operation = TypeVar("Operation")


@dataclasses.dataclass(frozen=True)
class Setting(Generic[Header, Operation]):
    """One sort of engine: how it is watched, for one invariant or for all, and what its operations allow."""

    open: Callable[[Header, str | None], Any]
    legal: Callable[[Header, Any], Any]
    simpler: Simpler[Header, Operation]

    def replay(self, header: Header, operations: Sequence[Operation], only: str) -> Broken[Header, Operation] | None:
        """Performs what is legal of some operations; what broke, or None when the invariant `only` did not."""
        try:
            taped = Taped(self.open(header, only))
        except Exception:
            return None
        legal = self.legal(header, taped.run)

        def play(perform: Callable[[Operation], Any]) -> None:
            for operation in operations:
                if not legal.in_order(operation):
                    return
                if (fitted := legal.fit(operation)) is not None:
                    legal.note(fitted, perform(fitted))

        try:
            failure = taped.judged(play)
        except OperationError:
            return None
        if failure is None or failure.invariant != only:
            return None
        return Broken(header, tuple(taped.operations), failure)


class Taped(Generic[Operation]):
    """A run, and what was asked of it, the failing operation included."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.operations: list[Operation] = []

    def judged(self, play: Callable[[Callable[[Operation], Any]], None]) -> Failure | None:
        """Plays something and says what broke."""
        try:
            play(self._perform)
        except InvariantError as error:
            return Failure(error.name, error.problem, len(self.operations))
        except EngineFailure:
            return None
        return None

    def _perform(self, operation: Operation) -> Any:
        self.operations.append(operation)
        try:
            return self.run.perform(operation)
        except (InvariantError, EngineFailure):
            raise
        except Exception as error:
            if len(self.operations) == 1:
                raise
            raise InvariantError(TOTALITY, f"{type(error).__name__}: {error}") from error


Play = Callable[[Callable[[Operation], Any]], None]
"""Asks for one operation after the other; each answer may decide what comes next."""


@dataclasses.dataclass(frozen=True)
class HistorySuite(Generic[Header, Operation]):
    """A suite whose examples are histories. The first operation may fail by itself: then nothing is shown.

    `begin` makes a configuration about a topic, and what is played over it.
    """

    name: str
    about: str
    topics: tuple[str, ...]
    setting: Setting[Header, Operation]
    begin: Callable[[RandomChoices, str], tuple[Header, Play[Operation]]]
    pace: int = 1

    def run(self, seed: int, topics: Sequence[str] = ()) -> Failure | None:
        """Runs one example; None when every invariant holds."""
        broken = self._played(seed, topics)
        return None if broken is None else broken.failure

    def _played(self, seed: int, topics: Sequence[str]) -> Broken[Header, Operation] | None:
        topics = topics or self.topics
        header, play = self.begin(RandomChoices(seed), topics[seed % len(topics)])
        taped = Taped(self.setting.open(header, None))
        failure = taped.judged(play)
        return None if failure is None else Broken(header, tuple(taped.operations), failure)

    def shrink(self, seed: int, failure: Failure, topics: Sequence[str] = ()) -> Failure:
        """Leaves out and simplifies operations for as long as the same invariant breaks; its lines are a log's."""
        broken = self._played(seed, topics)
        if broken is None:
            return failure
        small = shrink(broken, self.setting.replay, self.setting.simpler)
        lines = tuple(msgspec.json.encode(line).decode() for line in (small.header, *small.operations))
        return Failure(small.failure.invariant, small.failure.problem, len(small.operations), lines)

"""Suites of histories: operations on one engine under watch, and the frame that plays, judges and shrinks them.

A run has `perform`, which raises `InvariantError` if an invariant does not hold; after an `EngineFailure`, of a defect
that the configuration names, nothing is judged. Legal operations are told by three methods: `fit` makes an operation
fit what came before it, None when it cannot be asked now; `in_order` says whether the history goes on at all when it
comes next; `note` takes note of an answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from hkv.contract.invariant import InvariantError
from hkv.contract.traffic import RandomChoices
from hkv.errors import EngineFailure, OperationError
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


Header = TypeVar("Header")
Operation = TypeVar("Operation")

TRIALS = 1500
"""Smaller cases that a search for the smallest may try."""


@dataclasses.dataclass(frozen=True)
class Broken(Generic[Header, Operation]):
    """Legal operations, the last of which breaks an invariant."""

    header: Header
    operations: tuple[Operation, ...]
    failure: Failure


Replay = Callable[[Header, Sequence[Operation], str], Broken[Header, Operation] | None]
"""Performs what is still legal of some operations until an invariant breaks; None when that one does not break."""

Simpler = Callable[[Broken[Header, Operation]], Iterator[tuple[Header, list[Operation]]]]
"""Simpler cases, each maybe as long as the given one, that might break the same invariant."""


def shrink(
    broken: Broken[Header, Operation], replay: Replay[Header, Operation], simpler: Simpler[Header, Operation]
) -> Broken[Header, Operation]:
    """A greedy search: fewer operations, then simpler ones, again and again until neither helps."""
    search = _Search(broken, replay)
    search.take(broken.header, list(broken.operations))
    while search.left > 0:
        before = search.steps
        search.shorten()
        for header, operations in _anew(search, simpler):
            search.take(header, operations)
        if search.steps == before:
            break
    return search.best


def _anew(
    search: _Search[Header, Operation], simpler: Simpler[Header, Operation]
) -> Iterator[tuple[Header, list[Operation]]]:
    """Candidates of the best case; of the new best one after each that was taken, from where the old one's stopped."""
    done = 0
    while True:
        steps = search.steps
        for number, candidate in enumerate(simpler(search.best)):
            if number < done:
                continue
            done = number + 1
            yield candidate
            if search.steps != steps:
                break
        else:
            return


class _Search(Generic[Header, Operation]):
    """The best case so far."""

    def __init__(self, broken: Broken[Header, Operation], replay: Replay[Header, Operation]) -> None:
        self.best = broken
        self.left = TRIALS
        self.steps = 0
        self._replay = replay
        self._tried: set[str] = set()

    def take(self, header: Header, operations: Sequence[Operation]) -> bool:
        """Tries a candidate; it becomes the best one if the same invariant breaks, and no later."""
        name = f"{header}{operations}"
        if not operations or self.left <= 0 or name in self._tried:
            return False
        self._tried.add(name)
        self.left -= 1
        found = self._replay(header, operations, self.best.failure.invariant)
        if found is None or len(found.operations) > len(self.best.operations):
            return False
        if (found.header, found.operations) != (self.best.header, self.best.operations):
            self.steps += 1
        self.best = found
        return True

    def shorten(self) -> None:
        """Leaves out runs of operations: half of them, then a quarter, down to one, from the end on."""
        size = max(1, len(self.best.operations) // 2)
        while size:
            before = len(self.best.operations)
            end = before
            while end > 0:
                start = max(0, end - size)
                kept = self.best.operations[:start] + self.best.operations[end:]
                length = len(self.best.operations)
                if len(kept) < length:
                    self.take(self.best.header, kept)
                end = min(start, len(self.best.operations))
            if size > 1 or len(self.best.operations) == before:
                size //= 2

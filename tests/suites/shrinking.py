"""Making a history of operations smaller for as long as the same invariant breaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from tests.suites.suite import Failure

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

"""Suites: seeded examples, each judged by named invariants, and a way to make a failing one smaller."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from hkv.contract.traffic import RandomChoices
from hkv.errors import MissingExtraError

Case = TypeVar("Case")

TOTALITY = "totality"
"""No legal operation fails: a refusal is an answer, an exception is not."""

PASSES = 3
"""Number of times that a case is gone through for something smaller."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """Invariant that one example breaks, the example's operations, and the case in words, one operation a line."""

    invariant: str
    problem: str
    size: int
    lines: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class CaseCheck(Generic[Case]):
    """An invariant of one drawn case, for suites that have no history of operations.

    `check` yields a sentence for each violation; its docstring states the promise. `promises` are ids of
    the published catalogue, `B-I18` and the like.
    """

    name: str
    promises: tuple[str, ...]
    check: Callable[[Case], Iterator[str]]

    @property
    def promise(self) -> str:
        """Promise of the check, in one sentence."""
        return " ".join((self.check.__doc__ or "").strip().partition("\n\n")[0].split())


def case_check(name: str, *promises: str) -> Callable[[Callable[[Case], Iterator[str]]], CaseCheck[Case]]:
    """Makes a named check of a generator of problems."""
    return lambda check: CaseCheck(name, promises, check)


Suite = Any
"""Examples that code which is right always passes: `CaseSuite`, or `tests.suites.history.HistorySuite`.

It has a `name`, what it is `about`, `topics` that its examples can be about, and a `pace`: examples that take about as
long as one of traffic. `run(seed, topics)` answers a `Failure` or None, and raises where the code under test fails
before any invariant can be asked; `shrink(seed, failure, topics)` answers the smallest example found.
"""


@dataclasses.dataclass(frozen=True)
class CaseSuite(Generic[Case]):
    """A suite of independent cases."""

    name: str
    about: str
    draw: Callable[[Any], Case]
    checks: tuple[CaseCheck[Case], ...]
    topics: tuple[str, ...] = ()
    pace: int = 10

    def run(self, seed: int, topics: Sequence[str] = ()) -> Failure | None:
        """Runs one example; None when every invariant holds."""
        return self._judge(Recorded(RandomChoices(seed)), self.checks)

    def _judge(self, choices: Recorded, checks: Sequence[CaseCheck[Case]]) -> Failure | None:
        case = self.draw(choices)
        size = getattr(case, "operations", 1)
        for number, check in enumerate(checks):
            try:
                for problem in check.check(case):
                    return Failure(check.name, problem, size, (str(case),))
            except MissingExtraError:
                raise
            except Exception as error:
                if number == 0:
                    raise
                return Failure(TOTALITY, f"{check.name}: {type(error).__name__}: {error}", size, (str(case),))
        return None

    def shrink(self, seed: int, failure: Failure, topics: Sequence[str] = ()) -> Failure:
        """Lowers the decisions that made the case, many at once and then one by one, while the same check fails."""
        first = Recorded(RandomChoices(seed))
        total = failure.invariant == TOTALITY
        checks = [check for check in self.checks if total or check.name == failure.invariant]
        best = self._judge(first, checks) or failure
        made = list(first.made)
        for _ in range(PASSES):
            before = list(made)
            for position in range(len(made)):
                for changed in _simpler(made, position):
                    trial = Recorded(None, changed)
                    try:
                        found = self._judge(trial, checks)
                    except Exception:
                        continue
                    if found is not None and found.size <= best.size and _weight(trial.made) < _weight(made):
                        best, made = found, list(trial.made)
                        break
            if made == before:
                break
        return best


def _simpler(made: Sequence[int], position: int) -> Iterator[list[int]]:
    """Decisions without some or one of them, or with a smaller value for one, the smallest first."""
    if position >= len(made):
        return
    before, after = made[:position], made[position + 1 :]
    for count in (len(after), 16, 4):
        yield [*before, *made[position + count :]]
        if any(after[:count]):
            yield [*before, made[position], *[0] * count, *after[count:]]
    yield [*before, *after]
    for value in sorted({0, made[position] // 2, made[position] - 1}) if made[position] else ():
        yield [*before, value, *after]


def _weight(made: Sequence[int]) -> tuple[int, int]:
    """Distance of decisions from the simplest ones: none at all, and then zeros."""
    return len(made), sum(made)


class Recorded:
    """Decisions that are remembered as numbers, and can be made again from them; without a source what is not given is
    0.
    """

    def __init__(self, source: RandomChoices | None, given: Sequence[int] = ()) -> None:
        self._source = source
        self._given = given
        self.made: list[int] = []

    def integer(self, low: int, high: int) -> int:
        """An integer from `low` to `high`, both included."""
        position = len(self.made)
        if self._source is not None:
            value = self._source.integer(low, high) - low
        else:
            value = self._given[position] if position < len(self._given) else 0
        value = max(0, min(value, high - low))
        self.made.append(value)
        return low + value

    def chance(self, percent: int) -> bool:
        """True in about `percent` of 100 cases."""
        return self.integer(0, 99) >= 100 - percent

    def pick(self, sequence: Sequence[Any]) -> Any:
        """One element of a sequence."""
        return sequence[self.integer(0, len(sequence) - 1)]

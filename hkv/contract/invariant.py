"""Invariants and registers of them: one runner for logs, engines and explorers of every dialect."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from hkv.errors import OperationError

Check = Callable[[Any], Iterator[str]]
"""Looks at a dialect's moment, an operation with the cache before and after it, and yields a sentence for each thing
that is wrong; nothing when the invariant holds."""

EVERY: tuple[type, ...] = ()
"""Value of `after` for invariants that hold after every operation."""


class UnknownError(Exception):
    """An invariant asked about something that a log does not say."""


class Unknown:
    """Something that a log does not say, such as the state after an operation."""

    def __getattr__(self, name: str) -> Any:
        raise UnknownError(name)

    def __eq__(self, other: object) -> bool:
        raise UnknownError("compared")

    __hash__ = None  # type: ignore[assignment]


class InvariantError(AssertionError):
    """An invariant does not hold.

    Args:
      name: the invariant.
      problem: the problem, in words.
    """

    def __init__(self, name: str, problem: str) -> None:
        self.name = name
        self.problem = problem
        super().__init__(f"{name}: {problem}")


@dataclasses.dataclass(frozen=True)
class Invariant:
    """Something that holds after certain operations, whatever came before.

    Attributes:
      name: in one or two words.
      promises: the published invariants that it stands for, `B-I1` to `B-I38`; `docs/tables/invariants.md` lists them.
      dialect: name of the dialect whose rules promise it.
      after: operations after which it holds; `EVERY` for all.
      check: finds violations. Its docstring states the promise, and the exceptions by example.
      start: makes the check of one run, for invariants that remember what happened; None for those that do not.
      needs: capabilities (`Dialect.capabilities`) without which it cannot be asked.
    """

    name: str
    promises: tuple[str, ...]
    dialect: str
    after: tuple[type, ...]
    check: Check
    start: Callable[[Any], Check] | None = None
    needs: tuple[str, ...] = ()

    def begin(self, config: Any) -> Invariant:
        """The invariant for one run, from an empty cache of a configuration on."""
        return self if self.start is None else dataclasses.replace(self, check=self.start(config), start=None)

    def __call__(self, moment: Any) -> None:
        """Checks one moment.

        Raises:
          InvariantError: it does not hold; names the first violation.
          OperationError: it remembers what happened, and `begin` was not called.
        """
        if self.start is not None:
            raise OperationError("invariant", self.name, "one that was begun for a run")
        if self.after and not isinstance(moment.operation, self.after):
            return
        for problem in self.check(moment):
            raise InvariantError(self.name, f"after {describe_briefly(moment.operation)}: {problem}")

    @property
    def promise(self) -> str:
        """Promise of the invariant, in one sentence."""
        return " ".join((self.check.__doc__ or "").strip().partition("\n\n")[0].split())


class InvariantState(Protocol):
    """State of an invariant during one run."""

    def __init__(self, config: Any) -> None:
        """Begins with an empty cache."""

    def check(self, moment: Any) -> Iterator[str]:
        """See `Invariant.check`."""
        ...


AnyCheck = TypeVar("AnyCheck", bound=Callable[..., Iterator[str]])
Remembering = TypeVar("Remembering", bound=InvariantState)


class Register(dict[str, Invariant]):
    """The invariants of one dialect, by name.

    Args:
      dialect: name of the dialect whose rules promise them, as `Invariant.dialect`.
    """

    def __init__(self, dialect: str) -> None:
        super().__init__()
        self._dialect = dialect

    def invariant(
        self, name: str, *promises: str, after: tuple[type, ...] = EVERY, needs: tuple[str, ...] = ()
    ) -> Callable[[AnyCheck], AnyCheck]:
        """Enters a check."""

        def enter(check: AnyCheck) -> AnyCheck:
            self[name] = Invariant(name, promises, self._dialect, after, check, needs=needs)
            return check

        return enter

    def remembering(
        self, name: str, *promises: str, after: tuple[type, ...] = EVERY, needs: tuple[str, ...] = ()
    ) -> Callable[[type[Remembering]], type[Remembering]]:
        """Enters a class, one object of which judges one run."""

        def enter(memory: type[Remembering]) -> type[Remembering]:
            def start(config: Any) -> Check:
                return memory(config).check

            self[name] = Invariant(name, promises, self._dialect, after, memory.check, start, needs)  # type: ignore[arg-type]
            return memory

        return enter


def describe_briefly(operation: object) -> str:
    """An operation in a few words."""
    name = type(operation).__name__.removesuffix("Op").lower()
    return f"{name} {getattr(operation, 'id', '')}".strip()


def judged(invariants: Iterable[Invariant], lacks: frozenset[str]) -> list[Invariant]:
    """The invariants that can be asked of an engine with these lacks."""
    return [invariant for invariant in invariants if not lacks.intersection(invariant.needs)]


@dataclasses.dataclass(frozen=True)
class PlainMoment:
    """An operation, its answer, and the answers of a look at the state before and after it.

    Attributes:
      header: configuration of the engine.
    """

    header: Any
    operation: Any
    answer: Any
    before: Any
    after: Any


class PlainWatch:
    """An engine that performs operations, looked at after each of them, for dialects with no moment of their own.

    Args:
      engine: the engine, empty.
      header: its configuration.
      invariants: what is asked of each `PlainMoment`.
      look: the operation that is answered with the whole state, and changes nothing.
    """

    def __init__(self, engine: Any, header: Any, invariants: Iterable[Invariant], look: Any) -> None:
        self._engine, self._header, self._look = engine, header, look
        self._invariants = [invariant.begin(header) for invariant in invariants]
        self._state = engine.perform(look)

    def perform(self, operation: Any) -> Any:
        """Performs one operation and returns the engine's answer.

        Raises:
          InvariantError: an invariant does not hold after it.
        """
        answer = self._engine.perform(operation)
        moment = self.moment(operation, answer, self._engine.perform(self._look))
        for invariant in self._invariants:
            invariant(moment)
        self._state = moment.after
        return answer

    def moment(self, operation: Any, answer: Any, after: Any) -> PlainMoment:
        """The moment that invariants are asked of; dialects that know more of one than two states make their own."""
        return PlainMoment(self._header, operation, answer, self._state, after)

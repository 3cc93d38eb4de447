"""What an invariant is, and the register of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from hkv.dialects.vllm.config import NAME, VllmConfig
from hkv.dialects.vllm.invariants.moment import InvariantError, Moment
from hkv.errors import OperationError

Check = Callable[[Any], Iterator[str]]
"""Looks at a `Moment`, or at what stands for one in another log format, and yields a sentence for each thing that is
wrong; nothing when the invariant holds."""

EVERY: tuple[type, ...] = ()
"""For invariants that hold after every operation."""


@dataclasses.dataclass(frozen=True)
class Invariant:
    """Something that holds after certain operations, whatever came before.

    Attributes:
      name: in one or two words.
      promises: the published invariants that it stands for, `B-I1` to `B-I38`; `docs/invariants.md` says what they are.
      dialect: whose rules promise it.
      after: operations after which it holds; `EVERY` for all.
      check: finds what is wrong. Its docstring says what is promised, and the exceptions by example.
      start: makes the check of one run, for invariants that remember what happened; None for those that do not.
    """

    name: str
    promises: tuple[str, ...]
    dialect: str
    after: tuple[type, ...]
    check: Check
    start: Callable[[VllmConfig], Check] | None = None

    def begin(self, config: VllmConfig) -> Invariant:
        """The invariant for one run, from an empty cache on."""
        return self if self.start is None else dataclasses.replace(self, check=self.start(config), start=None)

    def __call__(self, moment: Any) -> None:
        """Checks one moment.

        Raises:
          InvariantError: it does not hold; says what is wrong first.
          OperationError: it remembers what happened, and `begin` was not called.
        """
        if self.start is not None:
            raise OperationError("invariant", self.name, "one that was begun for a run")
        if self.after and not isinstance(moment.operation, self.after):
            return
        for problem in self.check(moment):
            raise InvariantError(self.name, f"after {describe(moment.operation)}: {problem}")

    @property
    def promise(self) -> str:
        """What it promises, in one sentence."""
        return " ".join((self.check.__doc__ or "").strip().partition("\n\n")[0].split())


INVARIANTS: dict[str, Invariant] = {}
"""Every invariant of the operation log, by name. Those with a `start` have to be begun; `Watch` does."""


def invariant(
    name: str, *promises: str, after: tuple[type, ...] = EVERY, dialect: str = NAME
) -> Callable[[Check], Check]:
    """Enters a check into `INVARIANTS`."""

    def enter(check: Check) -> Check:
        INVARIANTS[name] = Invariant(name, promises, dialect, after, check)
        return check

    return enter


Remembering = TypeVar("Remembering", bound="Memory")


class Memory(Protocol):
    """What an invariant remembers of one run."""

    def __init__(self, config: VllmConfig) -> None:
        """Begins with an empty cache."""
        ...

    def check(self, moment: Moment) -> Iterator[str]:
        """See `Invariant.check`."""
        ...


def remembering(
    name: str, *promises: str, after: tuple[type, ...] = EVERY, dialect: str = NAME
) -> Callable[[type[Remembering]], type[Remembering]]:
    """Enters a class, one object of which judges one run, into `INVARIANTS`."""

    def enter(memory: type[Remembering]) -> type[Remembering]:
        def start(config: VllmConfig) -> Check:
            return memory(config).check

        INVARIANTS[name] = Invariant(name, promises, dialect, after, memory.check, start)  # type: ignore[arg-type]
        return memory

    return enter


def describe(operation: object) -> str:
    """An operation in a few words."""
    name = type(operation).__name__.removesuffix("Op").lower()
    return f"{name} {getattr(operation, 'id', '')}".strip()

"""What an invariant is, and the register of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from hkv.dialects.vllm.config import NAME
from hkv.oracle import oplog
from hkv.testing.invariants.moment import InvariantError, Moment

Check = Callable[[Moment], Iterator[str]]
"""Yields a sentence for each thing that is wrong; nothing when the invariant holds."""

EVERY: tuple[type, ...] = ()
"""For invariants that hold after every operation."""


@dataclasses.dataclass(frozen=True)
class Invariant:
    """Something that holds after certain operations, whatever came before.

    Attributes:
      name: in one or two words.
      dialect: whose rules promise it.
      after: operations after which it holds; `EVERY` for all.
      check: finds what is wrong. Its docstring says what is promised, and the exceptions by example.
    """

    name: str
    dialect: str
    after: tuple[type, ...]
    check: Check

    def __call__(self, moment: Moment) -> None:
        """Checks one moment.

        Raises:
          InvariantError: it does not hold; says what is wrong first.
        """
        if self.after and not isinstance(moment.operation, self.after):
            return
        for problem in self.check(moment):
            raise InvariantError(self.name, f"after {describe(moment.operation)}: {problem}")


INVARIANTS: dict[str, Invariant] = {}
"""Every invariant, by name."""


def invariant(name: str, after: tuple[type, ...] = EVERY, dialect: str = NAME) -> Callable[[Check], Check]:
    """Enters a check into `INVARIANTS`."""

    def enter(check: Check) -> Check:
        INVARIANTS[name] = Invariant(name, dialect, after, check)
        return check

    return enter


def describe(operation: oplog.Operation) -> str:
    """An operation in a few words."""
    name = type(operation).__name__.removesuffix("Op").lower()
    return f"{name} {getattr(operation, 'id', '')}".strip()

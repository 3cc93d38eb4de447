"""Failing cases of two engines, and the rules by which a dialect has them made smaller."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from hkv.contract.answer import Mismatch
from hkv.contract.log import Lifecycle
from hkv.errors import HKVError


@dataclasses.dataclass(frozen=True)
class Case:
    """Operations on which two engines disagree.

    Attributes:
      header: the configuration, of either kind of log.
      operations: legal ones, by `docs/oplog.md`; those after the one that is answered differently, if any, follow the
        answers of the engine in doubt, until it breaks an invariant.
      answers: of the engine that counts, up to the operation that is answered differently.
      mismatch: place and values of the difference between the answers to that one.
    """

    header: Any
    operations: tuple[Any, ...]
    answers: tuple[Any, ...]
    mismatch: Mismatch

    @property
    def differing(self) -> tuple[Any, ...]:
        """The operations up to the one that is answered differently."""
        return self.operations[: len(self.answers)]

    @property
    def fails(self) -> bool:
        """True if an engine fails, rather than answers wrongly."""
        return self.mismatch.field == "error"

    @property
    def failure(self) -> str:
        """The failure in words, without names and numbers; empty where an engine answers wrongly."""
        return " ".join(_DETAILS.sub(" ", str(self.mismatch.got)).split()) if self.fails else ""

    @property
    def size(self) -> tuple[int, int, int]:
        """Measures that shrinking makes smaller: operations, then tokens and other numbers, then blocks and groups."""
        numbers = sum(map(weight, self.operations))
        blocks = self.header.num_blocks
        count = sum(blocks) if isinstance(blocks, list) else blocks
        return len(self.operations), numbers, count + 1000 * len(self.header.groups)


_DETAILS = re.compile(r"'[^']*'|[\d\[\],]+")
"""Names, numbers and lists in an error."""


def weight(operation: Any) -> int:
    """Sum of an operation's numbers, their lists included."""
    total = 0
    for name in operation.__struct_fields__:
        value = getattr(operation, name)
        if name == "want" or value is None:
            continue
        if isinstance(value, list):
            total += 2 * len(value) + sum(item for item in value if type(item) is int and item < 100)
            total += 100 * sum(type(item) is int and item >= 100 for item in value)
        elif isinstance(value, int):
            total += value
        elif not isinstance(value, str):
            total += 5
    return total


@dataclasses.dataclass
class Best:
    """The smallest case so far. It may be replaced whenever a generator of candidates yields one."""

    case: Case


Candidates = Iterator[tuple[Any, list[Any]]]
"""Headers and operations to try."""


class Repair(Protocol):
    """Makes operations legal again, one after the other, after something was taken away."""

    def fitted(self, operation: Any) -> Any | None:
        """The operation with its numbers cut to what is legal now, and followed; None when it cannot follow at all."""

    def answered(self, operation: Any, answer: Any) -> None:
        """Takes note of the answer to the operation that was fitted last."""


class LifecycleRepair:
    """Leaves out what can no longer follow, after a dialect has cut its numbers to what is legal.

    Args:
      lifecycle: follows the operations from the header on.
      fit: the operation with its numbers cut to what is legal now; None when it cannot follow at all. Without it,
        operations stay as they are.
    """

    def __init__(self, lifecycle: Lifecycle, fit: Callable[[Any], Any | None] = lambda operation: operation) -> None:
        self._lifecycle = lifecycle
        self._fit = fit

    def fitted(self, operation: Any) -> Any | None:
        """The operation, fitted and followed; None when it cannot follow."""
        fitting = self._fit(operation)
        try:
            if fitting is not None:
                self._lifecycle.follow(fitting)
        except HKVError:
            return None
        return fitting

    def answered(self, operation: Any, answer: Any) -> None:
        """Takes note of the answer to the operation that was fitted last."""
        self._lifecycle.answered(operation, answer)


@dataclasses.dataclass(frozen=True)
class ShrinkRules:
    """Rules of a dialect by which its logs are shrunk.

    Attributes:
      repair: a fresh `Repair` of a header.
      headers: smaller configurations than a header's; `check` says which of them are legal.
      check: raises HKVError for a configuration that the dialect forbids.
      operations: operations that are simpler than one, each by itself.
      pairs: a header and an operation that are simpler together.
      rewrites: candidates that change several operations at once.
      questions: operations that change nothing and may show a difference before an operation does.
    """

    repair: Callable[[Any], Repair]
    headers: Callable[[Any], Iterator[Any]] = lambda header: iter(())
    check: Callable[[Any], object] = lambda header: None
    operations: Callable[[Any], Iterator[Any]] = lambda operation: iter(())
    pairs: Callable[[Any, Any], Iterator[tuple[Any, Any]]] = lambda header, operation: iter(())
    rewrites: tuple[Callable[[Best], Candidates], ...] = ()
    questions: Callable[[Any], Iterator[Any]] = lambda operation: iter(())

"""What every way of making a failing case smaller works with: the case, and the steps that know no rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec

from hkv.oracle.compare import Mismatch
from hkv.oracle.oplog import Operation
from hkv.oracle.rtp_llm.structs import RtpOp


@dataclasses.dataclass(frozen=True)
class Case:
    """Operations at the last of which two engines disagree.

    Attributes:
      header: the configuration, of either sort of log.
      operations: legal ones, by `docs/oplog.md`.
      answers: of the engine that counts, one an operation.
      mismatch: where the answers to the last one differ.
    """

    header: Any
    operations: tuple[Any, ...]
    answers: tuple[Any, ...]
    mismatch: Mismatch

    @property
    def fails(self) -> bool:
        """Whether an engine fails, rather than answers wrongly."""
        return self.mismatch.field == "error"

    @property
    def size(self) -> tuple[int, int, int]:
        """What shrinking makes smaller: operations, then tokens and other numbers, then blocks and groups."""
        numbers = sum(map(weight, self.operations))
        blocks = self.header.num_blocks
        count = sum(blocks) if isinstance(blocks, list) else blocks
        return len(self.operations), numbers, count + 1000 * len(self.header.groups)


@dataclasses.dataclass
class Best:
    """The smallest case so far; generators of candidates read it anew each time, and go on from where they are."""

    case: Case


Candidates = Iterator[tuple[Any, list[Any]]]
"""Headers and operations to try."""


def without_requests(best: Best) -> Candidates:
    """One request less."""
    for id in dict.fromkeys(getattr(operation, "id", None) for operation in best.case.operations):
        if id is not None:
            yield best.case.header, [other for other in best.case.operations if getattr(other, "id", None) != id]


def without_runs(best: Best) -> Candidates:
    """A run of operations less: half of them, then quarters, down to one; from the end, on which nothing depends."""
    size = len(best.case.operations) // 2
    while size:
        start = len(best.case.operations) - size
        while start >= 0:
            operations = list(best.case.operations)
            yield best.case.header, operations[:start] + operations[start + size :]
            start = min(start, len(best.case.operations)) - size
        size //= 2


def each(best: Best) -> Iterator[tuple[int, Any]]:
    """Index and operation, one after the other, of a case that may shrink meanwhile."""
    index = 0
    while index < len(best.case.operations):
        yield index, best.case.operations[index]
        index += 1


def replaced(best: Best, index: int, **fields: Any) -> tuple[Any, list[Any]]:
    """The case with fields of one operation changed, if it has them."""
    operations = list(best.case.operations)
    if index < len(operations) and all(name in operations[index].__struct_fields__ for name in fields):
        operations[index] = msgspec.structs.replace(operations[index], **fields)
    return best.case.header, operations


def weight(operation: Operation | RtpOp) -> int:
    """How large an operation's numbers are, their lists included."""
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

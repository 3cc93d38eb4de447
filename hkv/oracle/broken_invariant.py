"""First invariant that an engine breaks on its own, without another engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from hkv.contract import registry
from hkv.contract.answer import EngineFactory, failure_of
from hkv.contract.invariant import InvariantError
from hkv.contract.log import describe
from hkv.oracle.reduction import shrink_rules


@dataclasses.dataclass(frozen=True)
class Broken:
    """The first invariant that does not hold.

    Attributes:
      name: of the dialect's `invariants`.
      line: of the operation after which it does not hold, 1-based in the log that the operations would be.
      operation: that operation, in words.
      problem: the problem, in words.
      promise: promise of the invariant.
    """

    name: str
    line: int
    operation: str
    problem: str
    promise: str


def first_broken(factory: EngineFactory, header: Any, operations: Sequence[Any]) -> Broken | str:
    """Performs operations on a fresh engine, asks every invariant after each, and stops at the first that is broken.

    Args:
      factory: makes the engine.
      header: its configuration.
      operations: the operations to perform.

    Returns:
      What is broken, or why there is nothing to say.
    """

    def drive(perform: Callable[[Any], Any]) -> None:
        for operation in operations:
            perform(operation)

    return on_its_own(factory, header, drive)[1]


def repaired(header: Any, operations: Sequence[Any]) -> Callable[[Callable[[Any], Any]], None]:
    """Drives operations on, whatever is answered: those that cannot follow are cut to what can, or left out."""
    repair = shrink_rules(header).repair(header)

    def drive(perform: Callable[[Any], Any]) -> None:
        for wanted in operations:
            operation = repair.fitted(wanted)
            if operation is not None:
                repair.answered(operation, perform(operation))

    return drive


def on_its_own(
    factory: EngineFactory, header: Any, drive: Callable[[Callable[[Any], Any]], None]
) -> tuple[tuple[Any, ...], Broken | str]:
    """Lets an engine run on its own answers, every invariant asked after each operation, and stops at the first broken.

    A wrong answer need not break anything by itself; what the engine does next on the strength of it may.

    Args:
      factory: makes the engine.
      header: its configuration.
      drive: drives traffic through the function that it is given, which performs an operation and returns the answer.

    Returns:
      The operations performed, and what is broken after the last, or why there is nothing to say.
    """
    dialect, performed = registry.dialect_of(header.dialect), list[Any]()
    if not dialect.invariants:
        return (), f"{dialect.title} has no invariants"
    try:
        watch = dialect.watch(factory(header), header)
    except Exception as error:
        return (), f"the engine cannot be watched: {failure_of(error).message}"

    def perform(operation: Any) -> Any:
        performed.append(operation)
        return watch.perform(operation)

    said: Broken | str
    try:
        drive(perform)
        said = f"no invariant is broken up to operation {len(performed)}"
    except InvariantError as error:
        promise = (dialect.invariants[error.name].check.__doc__ or "").strip().splitlines()[0]
        said = Broken(error.name, len(performed) + 1, describe(performed[-1]), error.problem, promise)
    except Exception as error:
        last, before = describe(performed[-1], 60) if performed else "the header", max(0, len(performed) - 1)
        reason = failure_of(error).message
        said = f"no invariant is broken up to operation {before}; then the engine fails at {last}: {reason}"
    return tuple(performed), said

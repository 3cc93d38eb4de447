"""First invariant that an engine breaks on its own, without another engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from hkv.dialects import registry
from hkv.oracle.check import describe
from hkv.oracle.engine import EngineFactory, failure_of
from hkv.oracle.invariant import InvariantError


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
    dialect = registry.dialect_of(header.dialect)
    if not dialect.invariants:
        return f"{dialect.title} has no invariants"
    try:
        engine = factory(header)
        watch = dialect.watch(engine, header)
    except Exception as error:
        return f"the engine cannot be watched: {failure_of(error).message}"
    for index, operation in enumerate(operations):
        try:
            watch.perform(operation)
        except InvariantError as error:
            promise = (dialect.invariants[error.name].check.__doc__ or "").strip().splitlines()[0]
            return Broken(error.name, index + 2, describe(operation), error.problem, promise)
        except Exception as error:
            return f"the engine fails at line {index + 2} ({describe(operation, 60)}): {failure_of(error).message}"
    return _none_up_to(len(operations))


def broken_later(
    factory: EngineFactory, header: Any, drive: Callable[[Callable[[Any], Any]], None], after: int
) -> Broken | str:
    """Lets an engine run on its own answers, every invariant asked after each operation, and stops at the first broken.

    A wrong answer need not break anything by itself; what the engine does next on the strength of it may.

    Args:
      factory: makes the engine.
      header: its configuration.
      drive: drives traffic through the function that it is given, which performs an operation and returns the answer.
      after: operations before which nothing is broken.

    Returns:
      What is broken, or why there is nothing to say.
    """
    dialect = registry.dialect_of(header.dialect)
    try:
        watch = dialect.watch(factory(header), header)
    except Exception as error:
        return f"the engine cannot be watched: {failure_of(error).message}"
    performed: list[Any] = []

    def perform(operation: Any) -> Any:
        performed.append(operation)
        return watch.perform(operation)

    try:
        drive(perform)
    except InvariantError as error:
        said = describe(performed[-1])
        promise = (dialect.invariants[error.name].check.__doc__ or "").strip().splitlines()[0]
        problem = f"running on its own answers, at operation {len(performed)}: {error.problem}"
        return Broken(error.name, len(performed) + 1, said, problem, promise)
    except Exception as error:
        return f"{_none_up_to(max(after, len(performed) - 1))}; then the engine fails: {failure_of(error).message}"
    return _none_up_to(len(performed))


def _none_up_to(operations: int) -> str:
    return f"no invariant is broken up to operation {operations}"

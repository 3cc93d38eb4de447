"""Calls of an engine, HKV's own or another's, whatever the dialect."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from hkv.dialects import registry
from hkv.dialects.dialect import Dialect
from hkv.errors import EngineTimeoutError, HKVError, UnsupportedConfigError


@dataclasses.dataclass(frozen=True)
class Failure:
    """Error that an engine raised instead of an answer.

    Attributes:
      message: the error, in words.
      timed_out: True if the engine was silent for longer than it may be.
    """

    message: str
    timed_out: bool = False


EngineFactory = Callable[[Any], Any]
"""Makes an engine, empty, of a header's configuration; `Dialect.perform` says what its engines have to offer. It raises
`hkv.errors.ConfigError` for a configuration that it cannot represent."""


@runtime_checkable
class BatchEngine(Protocol):
    """An engine that would rather have many operations at once than one at a time."""

    def run(self, operations: Sequence[Any]) -> list[Any]:
        """Performs operations in order and returns the answer to each."""
        ...


def make_engine(factory: EngineFactory, header: Any) -> Any:
    """An engine of a header's configuration.

    Raises:
      UnsupportedConfigError: it does not implement it, or has no methods for what logs of its version ask for.
    """
    engine = factory(header)
    if missing := registry.dialect_of(header.dialect).missing_methods(engine, header):
        expected = f"an engine that has {', '.join(missing)}, which version {header.oplog} of the log asks for"
        raise UnsupportedConfigError("engine", type(engine).__name__, expected)
    return engine


def attempt(dialect: Dialect, engine: Any, operation: Any) -> Any:
    """Performs one operation; an error, or an answer of the wrong type, stands as a Failure in the answer's place."""
    return attempt_with(dialect.perform, dialect.answer_type(operation), engine, operation)


def attempt_with(perform: Callable[[Any, Any], Any], wanted: Any, engine: Any, operation: Any) -> Any:
    """`attempt`, with what a dialect says: how operations are performed, and the type of this one's answer."""
    try:
        answer = perform(engine, operation)
    except Exception as error:
        return failure_of(error)
    if (answer is not None) if wanted is None else not isinstance(answer, wanted):
        return Failure(f"answered {answer!r}, where {wanted.__name__ if wanted else None} was to come")
    return answer


def answers(dialect: Dialect, engine: Any, operations: Sequence[Any], again: Callable[[], Any]) -> Iterator[Any]:
    """Answers of an engine to each operation, in order; an engine that takes batches gets them all at once.

    An error of the engine is yielded as a Failure, and ends the run. An engine that fails in a batch does not
    say where: engines that `again` makes are given ever closer prefixes of it.
    """
    if isinstance(engine, BatchEngine):
        got, failure = _run(engine, operations)
        if failure is not None:
            right, wrong = 0, len(operations)
            while wrong - right > 1:
                middle = (right + wrong) // 2
                found = _run(again(), operations[:middle])
                right, wrong = (right, middle) if found[1] else (middle, wrong)
                got, failure = (got, found[1]) if found[1] else (found[0], failure)
        yield from got
        if failure is not None:
            yield failure
        return
    for operation in operations:
        answer = attempt(dialect, engine, operation)
        yield answer
        if isinstance(answer, Failure):
            return


def _run(engine: Any, operations: Sequence[Any]) -> tuple[Sequence[Any], Failure | None]:
    try:
        return engine.run(operations), None
    except HKVError as error:
        return (), failure_of(error)


def failure_of(error: Exception) -> Failure:
    """Failure for an error that an engine raised: an error of HKV's in its words, any other with its place."""
    if isinstance(error, HKVError):
        return Failure(str(error), isinstance(error, EngineTimeoutError))
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {_installed(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    return Failure(f"{type(error).__name__}: {error}{place}")


def _installed(path: str) -> str:
    """A file of an installed package by its place in the package, which is the same on every machine; others whole."""
    return path.rpartition("site-packages/")[2]

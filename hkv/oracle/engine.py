"""Calls of an engine, HKV's own or another's, whatever the dialect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hkv.contract import registry
from hkv.contract.answer import BatchEngine, EngineFactory, Failure, Mismatch, attempt_with, failure_of
from hkv.contract.dialect import Dialect
from hkv.errors import HKVError, UnsupportedConfigError


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


def compare(dialect: Dialect, want: Any, got: Any, version: int, lacks: frozenset[str]) -> Mismatch | None:
    """`Dialect.compare` of what both answers have."""
    if lacks:
        want, got = dialect.without(want, lacks), dialect.without(got, lacks)
    return dialect.compare(want, got, version)

"""Runs a recorded log on an engine and reports the first line at which the two differ."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from hkv.bugs import BUGS
from hkv.contract import registry
from hkv.contract.answer import EngineFactory, failure_of
from hkv.contract.invariant import InvariantError
from hkv.contract.log import Log, describe
from hkv.errors import EngineProcessError, FileError, HKVError, UnsupportedConfigError
from hkv.oracle.engine import answers, compare

AnyHeader = TypeVar("AnyHeader", bound=msgspec.Struct)
"""A header of any log."""

HISTORY = 6
"""Number of earlier operations on the same request that a report shows."""

MOST_DEFECTS = 3
"""Upstream defects that are tried together on one log."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first line of a log that an engine answers differently.

    Attributes:
      path: the log; `line`: 1-based line number.
      operation: name of the operation; `id`: the request it names, or None.
      field: place in the answer; `want`: the recorded value; `got`: the engine's.
      history: `(line, text)` of the last operations on the same request, this one last.
    """

    path: str
    line: int
    operation: str
    id: str | None
    field: str
    want: Any
    got: Any
    history: tuple[tuple[int, str], ...]

    def describe(self) -> str:
        """The report, a few lines of text."""
        subject = f"{self.operation} {self.id}" if self.id else self.operation
        lines = [f"{self.path}:{self.line}: {subject}: {self.field}", f"  log    {self.want}", f"  engine {self.got}"]
        if self.history:
            lines.append("  last operations" + (f" on {self.id}:" if self.id else ":"))
            lines += [f"    {line}: {text}" for line, text in self.history]
        return "\n".join(lines)


def check_log(log: Log, factory: EngineFactory, bugs: Sequence[str] = ()) -> Difference | None:
    """Performs a log's operations on a fresh engine and returns the first difference, or None.

    Args:
      log: the log.
      factory: makes the engine, from the log's own kind of header.
      bugs: names of upstream defects to reproduce, besides those that the header names.

    Raises:
      FileError: the engine cannot represent the log's configuration.
      UnsupportedConfigError: it does not implement that configuration, and says so.
      EngineProcessError: it cannot start.
    """
    try:
        engine = factory(with_bugs(log.header, bugs))
    except (UnsupportedConfigError, EngineProcessError):
        raise
    except HKVError as error:
        raise FileError(log.path, 1, error.argument, error.value, error.expected) from error
    except Exception as error:
        raise FileError(log.path, 1, "engine", failure_of(error).message, "an engine that takes this header") from error
    dialect = registry.dialect_of(log.header.dialect)
    lacks = dialect.lacking(engine)
    given = answers(dialect, engine, log.operations, lambda: factory(with_bugs(log.header, bugs)))
    for index, got in enumerate(given):
        operation = log.operations[index]
        want = getattr(operation, "want", None)
        if mismatch := compare(dialect, want, got, log.header.oplog, lacks):
            return _difference(log, index, mismatch.field, mismatch.want, mismatch.got)
    return None


def known_defects(log: Log, factory: EngineFactory, difference: Difference, bugs: Sequence[str]) -> tuple[str, ...]:
    """Names of the fewest upstream defects under which a log agrees that differs without them; empty where none do.

    Logs of live engines do not say which defects their traffic ran into: one that was recorded before a defect had a
    name differs until it is named. Defects are added one at a time, each time the one that moves the first difference
    furthest, so that a few that show on different lines are found together.

    Args:
      log: the log.
      factory: makes the engine that it differs from.
      difference: the first difference, with `bugs` reproduced.
      bugs: defects that are reproduced already.
    """
    found: list[str] = []
    line = difference.line
    names = [bug.name for bug in BUGS.values() if bug.part == "manager"]
    while len(found) < MOST_DEFECTS:
        reached: dict[str, float] = {}
        for name in names:
            if name not in (*bugs, *found):
                with contextlib.suppress(HKVError):  # the configuration or the engine knows no such defect
                    other = check_log(log, factory, (*bugs, *found, name))
                    reached[name] = math.inf if other is None else other.line
        best = max(reached, key=lambda name: reached[name], default="")
        if not best or reached[best] <= line:
            return ()
        found.append(best)
        if reached[best] == math.inf:
            return tuple(found)
        line = int(reached[best])
    return ()


def judge_log(log: Log) -> tuple[Difference | None, frozenset[str]]:
    """Judges a log by the invariants of its dialect alone, without another engine.

    Returns:
      The first invariant that is broken, as a difference between its promise and the problem, or None; and the names of
      the invariants that were asked.

    Raises:
      UnsupportedConfigError: the dialect has no invariants that logs are judged by.
    """
    dialect = registry.dialect_of(log.header.dialect)
    watch = dialect.watch_log(log)
    for index, operation in enumerate(log.operations):
        try:
            watch.perform(operation)
        except InvariantError as error:
            promise = dialect.invariants[error.name].promise
            return _difference(log, index, f"invariant {error.name}", promise, error.problem), frozenset(watch.asked)
    return None, frozenset(watch.asked)


def with_bugs(header: AnyHeader, bugs: Sequence[str]) -> AnyHeader:
    """The header with further upstream defects named; naming any makes it a header of version 2."""
    if not bugs:
        return header
    return msgspec.structs.replace(header, oplog=max(2, header.oplog), bugs=sorted({*header.bugs, *bugs}))  # type: ignore[attr-defined]


def _difference(log: Log, index: int, field: str, want: Any, got: Any) -> Difference:
    operation = log.operations[index]
    id = getattr(operation, "id", None)
    related = [
        number
        for number in range(index + 1)
        if id is None or getattr(log.operations[number], "id", None) == id or number == index
    ]
    history = tuple((number + 2, describe(log.operations[number])) for number in related[-HISTORY:])
    name = str(msgspec.to_builtins(operation)["op"])
    return Difference(log.path, index + 2, name, id, field, want, got, history)

"""Runs a recorded log on an engine and reports the first line at which the two differ."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import pathlib
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec

from hkv.contract import registry
from hkv.contract.answer import EngineFactory, failure_of
from hkv.contract.invariant import InvariantError
from hkv.contract.log import Log, check_answered, describe, parse_object
from hkv.errors import EngineProcessError, FileError, HKVError, UnsupportedConfigError
from hkv.oracle.engine import answers, attempt, compare
from hkv.oracle.log_file import find_logs, part_path

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


Performing: TypeAlias = Callable[[Any, Any, Sequence[Any], Callable[[], Any]], Iterator[Any]]
"""Has an engine of a dialect perform operations, and gives the answers, as `hkv.oracle.engine.answers` does."""


def check_log(
    log: Log, factory: EngineFactory, bugs: Sequence[str] = (), performing: Performing = answers
) -> Difference | None:
    """Performs a log's operations on a fresh engine and returns the first difference, or None.

    Defects of `bugs` are reproduced besides those that the header names. FileError if the engine cannot represent the
    configuration; an engine that says it does not implement it, or cannot start, raises an error of its own.
    """
    try:
        engine = reproducing(factory, bugs)(log.header)
    except (UnsupportedConfigError, EngineProcessError):
        raise
    except HKVError as error:
        raise FileError(log.path, 1, error.argument, error.value, error.expected) from error
    except Exception as error:
        raise FileError(log.path, 1, "engine", failure_of(error).message, "an engine that takes this header") from error
    dialect = registry.dialect_of(log.header.dialect)
    lacks = dialect.missing_capabilities(engine)
    given = performing(dialect, engine, log.operations, lambda: reproducing(factory, bugs)(log.header))
    for index, got in enumerate(given):
        operation = log.operations[index]
        want = getattr(operation, "want", None)
        if mismatch := compare(dialect, want, got, log.header.oplog, lacks):
            return _difference(log, index, mismatch.field, mismatch.want, mismatch.got)
    return None


def known_defects(log: Log, factory: EngineFactory, difference: Difference, bugs: Sequence[str]) -> tuple[str, ...]:
    """Names of the fewest upstream defects under which a log agrees that differs without them; empty where none do.

    Logs of live engines do not say which defects their traffic ran into: one that was recorded before a defect had a
    name differs until it is named.
    """

    def reached(names: tuple[str, ...]) -> float:
        other = check_log(log, factory, (*bugs, *names))
        return math.inf if other is None else other.line

    known = registry.dialect_of(log.header.dialect).bugs.values()
    found, line = fewest_defects(
        [bug.name for bug in known if bug.part == "manager" and bug.name not in bugs], difference.line, reached
    )
    return found if line == math.inf else ()


def fewest_defects(
    names: Sequence[str], place: float, reached: Callable[[tuple[str, ...]], float]
) -> tuple[tuple[str, ...], float]:
    """The fewest defects under which two engines agree, and infinity; or those under which they part furthest on.

    Defects are added one at a time, each time the one that moves the first difference furthest, so that a few that show
    in different places are found together.

    Args:
      names: of the defects.
      place: of the first difference without any.
      reached: place of the first one under some; an HKVError where the configuration or an engine knows no such defect.
    """
    found: tuple[str, ...] = ()
    while len(found) < MOST_DEFECTS and place < math.inf:
        places = dict[str, float]()
        for name in names:
            if name not in found:
                with contextlib.suppress(HKVError):
                    places[name] = reached((*found, name))
        best = max(places, key=lambda name: places[name], default="")
        if not best or places[best] <= place:
            break
        found, place = (*found, best), places[best]
    return found, place


def judge_log(log: Log) -> tuple[Difference | None, frozenset[str]]:
    """Judges a log by the invariants of its dialect alone, without another engine.

    The first one that is broken, as a difference between its promise and the problem, or None; and the names of those
    that were asked.
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


def reproducing(factory: EngineFactory, bugs: Sequence[str]) -> EngineFactory:
    """The factory, whose engines reproduce defects besides those that a header names."""
    return (lambda header: factory(with_bugs(header, bugs))) if bugs else factory


def _difference(log: Log, index: int, field: str, want: Any, got: Any) -> Difference:
    return difference_of(log.path, [*enumerate(log.operations[: index + 1], 2)], field, want, got)


def difference_of(path: str, performed: Sequence[tuple[int, Any]], field: str, want: Any, got: Any) -> Difference:
    """The difference in the answer to the last of some operations, each of which comes with its line."""
    line, operation = performed[-1]
    id = getattr(operation, "id", None)
    related = [(number, each) for number, each in performed if id is None or getattr(each, "id", None) == id]
    history = tuple((number, describe(each)) for number, each in related[-HISTORY:])
    return Difference(path, line, str(operation.__struct_config__.tag), id, field, want, got, history)


# Verdicts on logs as JUnit XML, which CI services read: one test case a log.


def junit_xml(engine: str, verdicts: Mapping[str, tuple[str, str]], failing: Collection[str]) -> bytes:
    """A test suite of one case a log; verdicts that are neither `failing` nor `agrees` count as skipped."""
    failed = sum(verdict in failing for verdict, _ in verdicts.values())
    skipped = sum(verdict not in failing and verdict != "agrees" for verdict, _ in verdicts.values())
    counts = {"tests": str(len(verdicts)), "failures": str(failed), "skipped": str(skipped)}
    suite = ElementTree.Element("testsuite", {"name": f"hkv check --engine {engine}", **counts})
    for path, (verdict, said) in verdicts.items():
        case = ElementTree.SubElement(suite, "testcase", {"classname": "hkv.check", "name": path})
        if verdict in failing:
            ElementTree.SubElement(case, "failure", {"message": verdict}).text = said
        elif verdict != "agrees":
            ElementTree.SubElement(case, "skipped", {"message": f"{verdict}: {said}" if said else verdict})
    return ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True) + b"\n"


# Logs that are still being written, held against an engine as they grow: shadowing from another process.
#
# A live engine that is recorded (`hkv.oracle.attach`) pays for the recording alone; whoever follows its folder
# performs the operations on an engine of HKV's, in a process of its own, a second behind. Of a log only the engine's
# state and the last operations on each request are kept, however long it grows.

TICK = 0.5
"""Seconds between two looks at the files."""

AT_ONCE = 1 << 20
"""Bytes that are read of a log before the others have their turn."""


class FollowedLog:
    """A log, and an engine that performs what it says, up to the first `difference`.

    It must not be compressed: the end of what is compressed cannot be read before it is written.
    """

    def __init__(self, path: str, factory: EngineFactory) -> None:
        if not path.endswith(".jsonl"):
            raise FileError(path, None, "", "a compressed log", "one that is not, to be followed as it grows")
        self.path, self._factory = path, factory
        self.operations, self.difference = 0, None
        self._part = self._offset = self._line = 0
        self._dialect: Any = None
        self._header: Any = None
        self._engine: Any = None
        self._performed: collections.deque[tuple[int, Any]] = collections.deque(maxlen=16 * HISTORY)

    def advance(self) -> bool:
        """Performs the whole lines that have come since; whether there were any."""
        lines = self._new_lines()
        for line in lines:
            self._line += 1
            if self.difference is None:
                self._take(line)
        return bool(lines)

    def _new_lines(self) -> Sequence[bytes]:
        with part_path(pathlib.Path(self.path), self._part).open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read(AT_ONCE).rpartition(b"\n")
        if newline:
            self._offset += len(whole) + 1
            return whole.split(b"\n")
        if part_path(pathlib.Path(self.path), self._part + 1).exists():
            self._part, self._offset = self._part + 1, 0
            return self._new_lines()
        return ()

    def _take(self, line: bytes) -> None:
        if self._header is None:
            found = parse_object(line, self.path, 1)
            self._dialect = registry.dialect_of(found.get("dialect"))
            self._header = self._dialect.log.parse_header(line, found, self.path)
            self._lifecycle = self._dialect.lifecycle(self._header)
            self._engine = self._factory(self._header)
            self._lacks = self._dialect.missing_capabilities(self._engine)
            return
        operation = self._dialect.log.parse_operation(line, self.path, self._line, self._header)
        check_answered(operation, self.path, self._line)
        try:
            self._lifecycle.follow(operation)
        except HKVError as error:
            raise FileError(self.path, self._line, error.argument, error.value, error.expected) from error
        want = getattr(operation, "want", None)
        self._lifecycle.answered(operation, want)
        got = attempt(self._dialect, self._engine, operation)
        self.operations += 1
        self._performed.append((self._line, operation))
        if mismatch := compare(self._dialect, want, got, self._header.oplog, self._lacks):
            self.difference = difference_of(self.path, self._performed, mismatch.field, mismatch.want, mismatch.got)


def follow(paths: Sequence[str], factory: EngineFactory, quiet: float) -> Iterator[FollowedLog]:
    """Follows logs, and those that come to the folders, until none has grown for `quiet` seconds.

    Yields each log that differs, as it does; in the end every log.
    """
    followed: dict[str, FollowedLog] = {}
    last = time.monotonic()
    while True:
        for path in _logs(paths):
            followed.setdefault(path, FollowedLog(path, factory))
        grew = False
        for log in followed.values():
            before = log.difference
            grew = log.advance() or grew
            if before is None and log.difference is not None:
                yield log
        if grew:
            last = time.monotonic()
        elif time.monotonic() - last >= quiet:
            break
        else:
            time.sleep(min(TICK, quiet / 4))
    yield from followed.values()


def _logs(paths: Sequence[str]) -> Iterator[str]:
    """The logs so far; a folder may still be empty."""
    for path in paths:
        if not pathlib.Path(path).is_dir() or any(pathlib.Path(path).rglob("*.jsonl")):
            yield from find_logs([path])

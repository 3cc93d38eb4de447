"""Logs that are still being written, held against an engine as they grow: shadowing from another process.

A live engine that is recorded (`hkv.oracle.attach`) pays for the recording alone; whoever follows its folder performs
the operations on an engine of HKV's, in a process of its own, a second behind. Of a log only the engine's state and
the last operations on each request are kept, however long it grows.
"""

from __future__ import annotations

import collections
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from hkv.contract import registry
from hkv.contract.answer import EngineFactory
from hkv.contract.log import describe, parse_object
from hkv.errors import FileError, HKVError
from hkv.oracle.check import HISTORY, Difference
from hkv.oracle.engine import attempt, compare
from hkv.oracle.log_file import find_logs, part_path

TICK = 0.5
"""Seconds between two looks at the files."""

AT_ONCE = 1 << 20
"""Bytes that are read of a log before the others have their turn."""


class FollowedLog:
    """A log, and an engine that performs what it says.

    Args:
      path: of its first part; not compressed, as the end of what is compressed cannot be read before it is written.
      factory: makes the engine.

    Attributes:
      operations: number of operations performed.
      difference: the first one; nothing is performed after it.

    Raises:
      FileError: it is compressed.
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
        self._history: collections.deque[tuple[int, str, Any]] = collections.deque(maxlen=16 * HISTORY)

    def advance(self) -> bool:
        """Performs the whole lines that have come since; whether there were any.

        Raises:
          FileError: a line is none of a log, or the engine cannot represent the configuration.
        """
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
            self._lacks = self._dialect.lacking(self._engine)
            return
        operation = self._dialect.log.parse_operation(line, self.path, self._line, self._header)
        try:
            self._lifecycle.follow(operation)
        except HKVError as error:
            raise FileError(self.path, self._line, error.argument, error.value, error.expected) from error
        want = getattr(operation, "want", None)
        self._lifecycle.answered(operation, want)
        got = attempt(self._dialect, self._engine, operation)
        self.operations += 1
        self._history.append((self._line, describe(operation), getattr(operation, "id", None)))
        if mismatch := compare(self._dialect, want, got, self._header.oplog, self._lacks):
            id = getattr(operation, "id", None)
            related = [(number, text) for number, text, other in self._history if id is None or other == id]
            name = str(type(operation).__struct_config__.tag)
            place = (self.path, self._line, name, id, mismatch.field, mismatch.want, mismatch.got)
            self.difference = Difference(*place, tuple(related[-HISTORY:]))


def follow(paths: Sequence[str], factory: EngineFactory, quiet: float) -> Iterator[FollowedLog]:
    """Follows logs, and those that come to the folders, until none has grown for so many seconds.

    Args:
      paths: logs and folders.
      factory: makes the engine that each is held against.
      quiet: seconds.

    Yields:
      Each log that differs, as it does; in the end every log.

    Raises:
      FileError: as `FollowedLog.advance` does; there is no such path.
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

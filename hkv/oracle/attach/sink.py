"""Destinations of a live cache's operations: a log, or an engine of HKV's beside it."""

from __future__ import annotations

import collections
import contextlib
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from hkv.contract import registry
from hkv.contract.answer import taken
from hkv.contract.dialect import Dialect
from hkv.contract.log import describe
from hkv.oracle.attach.settings import AttachSettings
from hkv.oracle.attach.writer import LogFile, LogWriter
from hkv.oracle.check import Difference
from hkv.oracle.engine import attempt
from hkv.oracle.engines import engine_factory
from hkv.oracle.log_file import write_log

TOGETHER = 256
"""Calls for which the writing thread is woken."""

BACKLOG = 1 << 16
"""Calls that may wait for the writing thread; the observed engine waits for it at the end of a step with more."""

AT_ONCE = 32
"""Calls that it performs before it lets the observed engine's thread run, which would else wait for milliseconds."""


class ShadowError(AssertionError):
    """A live cache answered otherwise than HKV's engine beside it.

    Args:
      difference: where, and how.
    """

    def __init__(self, difference: Difference) -> None:
        self.difference = difference
        super().__init__(difference.describe())


class RecordSink:
    """Writes a log, in the writing thread.

    Args:
      file: the log.
      writer: the thread that performs calls and writes.
    """

    def __init__(self, file: LogFile, writer: LogWriter) -> None:
        self._file, self._writer = file, writer
        self._calls: collections.deque[Any] = collections.deque()
        self._perform: Callable[[Any], None] | None = None
        self.begin, self.operation = file.begin, file.operation
        writer.every_tick(self._write_all)

    def calls_to(self, perform: Callable[[Any], None]) -> Callable[[Any], None]:
        self._perform = perform
        return self._calls.append

    def step_ends(self) -> None:
        # The thread is woken seldom: it takes the interpreter from the observed engine whenever it runs.
        if len(self._calls) >= TOGETHER:
            self._writer.put(self._perform_all)
            if len(self._calls) >= BACKLOG:
                self._writer.flush()

    def close(self) -> None:
        self._writer.put(self._close)

    def let_go(self) -> None:
        """Leaves the log to the parent, in a forked process."""
        self._calls.clear()
        self._file.let_go()

    def _close(self) -> None:
        self._perform_all()
        self._file.close()
        with contextlib.suppress(ValueError):  # a forked process writes none of its parent's
            self._writer.no_tick(self._write_all)

    def _write_all(self) -> None:
        self._perform_all()
        self._file.flush()

    def _perform_all(self) -> None:
        calls, perform = self._calls, self._perform
        while calls and perform is not None:
            for _ in range(min(len(calls), AT_ONCE)):
                perform(calls.popleft())
            self._writer.pause()


class ShadowSink:
    """Performs a live cache's operations on another engine, and compares every answer.

    The first difference is reported, and the log up to it is written; nothing is performed after it.

    Args:
      path: the log, if there is a difference.
      settings: name of the engine, and what to do about a difference.

    Attributes:
      difference: the first one, or None.
      operations: operations compared.
    """

    def __init__(self, path: pathlib.Path, settings: AttachSettings) -> None:
        self._path, self._settings = path, settings
        self._factory = engine_factory(settings.engine)
        self._dialect: Dialect | None = None
        self._header: Any = None
        self._engine: Any = None
        self._performed: list[Any] = []
        self._answers: list[Any] = []
        self.difference: Difference | None = None

    @property
    def operations(self) -> int:
        """Operations compared."""
        return len(self._performed)

    def calls_to(self, perform: Callable[[Any], None]) -> Callable[[Any], None]:
        return perform

    def step_ends(self) -> None:
        pass

    def begin(self, header: Any) -> None:
        self._header, self._dialect = header, registry.dialect_of(header.dialect)
        self._engine = self._factory(header)

    def operation(self, operation: Any, answer: Any) -> None:
        if self.difference is not None or self._dialect is None:
            return
        want = attempt(self._dialect, self._engine, operation)
        self._performed.append(operation)
        self._answers.append(taken(want))
        # In the order in which `check` holds a log to an engine: what the live cache does not tell is not compared.
        if mismatch := self._dialect.compare(answer, want, self._header.oplog):
            self._differ(mismatch.field, mismatch.got, mismatch.want)

    def close(self) -> None:
        self._performed, self._answers, self._engine = [], [], None

    def _differ(self, field: str, want: Any, got: Any) -> None:
        operation = self._performed[-1]
        id = getattr(operation, "id", None)
        lines = [number for number, each in enumerate(self._performed) if id is None or getattr(each, "id", None) == id]
        history = tuple((number + 2, describe(self._performed[number])) for number in lines[-6:])
        name = str(operation.__struct_config__.tag)
        line = len(self._performed) + 1
        self.difference = Difference(str(self._path), line, name, id, field, want, got, history)
        if not hasattr(self._answers[-1], "message"):
            write_log(self._path, self._header, self._performed, self._answers)
        if self._settings.on_difference == "raise":
            raise ShadowError(self.difference)
        print(f"hkv: the live cache differs\n{self.difference.describe()}", file=sys.stderr, flush=True)

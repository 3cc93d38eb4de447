"""Destinations of a live cache's operations: a log, or an engine of HKV's alongside."""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

from hkv.contract import registry
from hkv.contract.answer import failure_of, taken
from hkv.contract.attach import beside
from hkv.contract.dialect import Dialect
from hkv.files import printable
from hkv.oracle.attach.shown import Shown
from hkv.oracle.check import Difference, difference_of
from hkv.oracle.engine import attempt, compare
from hkv.oracle.engines import engine_factory
from hkv.oracle.log_file import encode, open_output, part_path, write_log

TOGETHER = 256
"""Calls for which the writing thread is woken."""

BACKLOG = 1 << 16
"""Calls that may wait for the writing thread; the observed engine waits for it at the end of a step with more."""

AT_ONCE = 32
"""Calls that it performs before it lets the observed engine's thread run, which would else wait for milliseconds."""


class ShadowError(AssertionError):
    """A live cache answered otherwise than HKV's engine alongside."""

    def __init__(self, difference: Difference) -> None:
        self.difference = difference
        super().__init__(difference.describe())


class RecordSink:
    """Writes a log, in the writing thread."""

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

    The first `difference` is reported, or raised in the cache's own call, and the log up to it is written to the path;
    nothing is performed after it. `shown` is what a page shows of both.
    """

    def __init__(self, path: pathlib.Path, engine: str = "numpy", raises: bool = False) -> None:
        self._path, self._raises = path, raises
        self._factory = engine_factory(engine)
        self.shown = Shown(path.stem, engine, self._factory)
        self._dialect: Dialect | None = None
        self._header: Any = None
        self._engine: Any = None
        self._lacks = frozenset[str]()
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
        try:
            with beside():
                self._engine = self._factory(header)
        except Exception as error:  # of a configuration that the observed engine has taken
            if self._raises:
                raise
            told = f"cannot be observed: the engine beside it refuses its configuration: {failure_of(error).message}"
            print(f"hkv: the live cache {told}", file=sys.stderr, flush=True)
            return
        self._header, self._dialect = header, registry.dialect_of(header.dialect)
        self._lacks = self._dialect.missing_capabilities(self._engine)
        self.shown.begin(header, self._engine)

    def operation(self, operation: Any, answer: Any) -> None:
        if self.difference is not None or self._dialect is None:
            return
        with self.shown.lock, beside():
            want = attempt(self._dialect, self._engine, operation)
            self._performed.append(operation)
            self._answers.append(taken(want))
            self.shown.operation(operation, answer, want)
            # In the order in which `check` holds a log to an engine: what the live cache does not tell is not compared.
            mismatch = compare(self._dialect, answer, want, self._header.oplog, self._lacks)
            if mismatch is not None:
                told = (mismatch.field, mismatch.got, mismatch.want)
                self.difference = difference_of(str(self._path), [*enumerate(self._performed, 2)], *told)
                self.shown.differs(self._performed, answer, self.difference)
        if self.difference is not None:
            self._tell(self.difference)

    def close(self) -> None:
        self._performed, self._answers, self._engine = [], [], None
        self.shown.close()

    def let_go(self) -> None:
        """Leaves the page to the parent, in a forked process: a thread of the parent may have held its lock."""
        self.shown = Shown(self._path.stem, "", self._factory)

    def _tell(self, difference: Difference) -> None:
        if not hasattr(self._answers[-1], "message"):
            write_log(self._path, self._header, self._performed, self._answers)
        if self._raises:
            raise ShadowError(difference)
        said = printable(difference.describe())
        print(f"hkv: the live cache differs\n{said}", file=sys.stderr, flush=True)


# Log files that a thread of their own encodes and writes, so that the observed engine waits for neither.
#
# What was said is on disk within `TICK` seconds and what a write takes, however the process ends: the thread performs
# what waits and flushes, whole lines at a time, whether it is woken or not. A process that forks loses its threads:
# `restart` makes a new one in the child, where files that the parent writes are let go.

PAUSE = 2e-4
"""Seconds for which the thread lets others run."""

TICK = 0.5
"""Seconds between two times that everything said so far is written."""

WRITTEN = 1 << 16
"""Bytes of lines that are kept until the next tick, at most."""


class LogWriter:
    """A thread that writes logs; `problem` is the error that ended it, or None."""

    def __init__(self) -> None:
        self.problem: Exception | None = None
        self.restart()

    def restart(self) -> None:
        """Begins with a new thread and nothing to do; for a child process, whose parent does what it was given."""
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ticking: list[Callable[[], None]] = []
        self._hurried = False
        self._thread = threading.Thread(target=self._run, name="hkv-log-writer", daemon=True)
        self._thread.start()

    def every_tick(self, task: Callable[[], None]) -> None:
        """Has the thread do something every `TICK` seconds."""
        self._ticking.append(task)

    def no_tick(self, task: Callable[[], None]) -> None:
        """Has it do so no longer."""
        self._ticking.remove(task)

    def put(self, task: Callable[[], None]) -> None:
        """Has the thread do something, after everything it was given before."""
        self._queue.put(task)

    def pause(self) -> None:
        """In a task: lets other threads run, unless one waits for this one."""
        if not self._hurried:
            time.sleep(PAUSE)

    def flush(self) -> None:
        """Waits until everything given so far is done."""
        done = threading.Event()
        self._hurried = True
        self._queue.put(done.set)
        done.wait()
        self._hurried = False

    def close(self) -> None:
        """Ends the thread, everything given so far done."""
        self._hurried = True
        self._queue.put(self._tick)
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        due = time.monotonic() + TICK
        while True:
            with contextlib.suppress(queue.Empty):
                task = self._queue.get(timeout=max(0.0, due - time.monotonic()))
                if task is None:
                    return
                self._try(task)
            if time.monotonic() >= due:
                self._tick()
                due = time.monotonic() + TICK

    def _tick(self) -> None:
        for task in list(self._ticking):
            self._try(task)

    def _try(self, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception as error:
            self.problem = self.problem or error


class LogFile:
    """One log, part by part: after `part_bytes` bytes, before compression, the next part begins; None for one part."""

    def __init__(self, path: pathlib.Path, dialect: Dialect, part_bytes: int | None = None) -> None:
        self.path = path
        self._dialect, self._limit = dialect, part_bytes
        self._part = self._written = 0
        self._encode = msgspec.json.Encoder().encode
        self._answered: dict[type, bool] = {}
        self._output: BinaryIO | None = None
        self._lines: list[bytes] = []
        self._kept = 0
        self._gone = False

    def begin(self, header: Any) -> None:
        """Writes the header."""
        self._write(msgspec.json.encode(header))

    def operation(self, operation: Any, answer: Any) -> None:
        """Writes an operation and its answer; the operation is this file's from now on."""
        if isinstance(answer, list) or (answer is None and self._is_answered(type(operation))):
            self._write(encode(self._dialect, operation, answer))
            return
        if answer is not None:  # the same bytes, in a third of the time
            operation.want = answer
        self._write(self._encode(operation))

    def _is_answered(self, kind: type) -> bool:
        if kind not in self._answered:
            self._answered[kind] = "want" in kind.__struct_fields__  # type: ignore[attr-defined]
        return self._answered[kind]

    def flush(self) -> None:
        """Writes all lines so far, in one call, so that a process that is killed leaves whole lines."""
        if self._output is not None and self._lines and not self._gone:
            left = memoryview(b"".join(self._lines))
            while left:
                left = left[self._output.write(left) :]
            self._output.flush()
        self._lines.clear()
        self._kept = 0

    def let_go(self) -> None:
        """Leaves the file to the parent, in a forked process: nothing more is written.

        The file object is not asked for anything, since a thread of the parent may have held its lock as the process
        forked; a compressed one would write its end when it is collected, which then goes nowhere.
        """
        self._gone = True
        if self._output is not None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._output.fileno())
            os.close(nowhere)

    def close(self) -> None:
        """Closes the file."""
        self.flush()
        if self._output is not None and not self._gone:
            self._output.close()
            self._output = None

    def _write(self, line: bytes) -> None:
        if self._gone:
            return
        if self._limit is not None and self._written and self._written + len(line) > self._limit:
            self.close()
            self._part, self._written = self._part + 1, 0
        if self._output is None:
            self._output = open_output(part_path(self.path, self._part))
        self._lines.append(line + b"\n")
        self._written += len(line) + 1
        self._kept += len(line) + 1
        if self._kept >= WRITTEN:
            self.flush()

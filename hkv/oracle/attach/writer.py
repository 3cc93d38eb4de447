"""Log files that a thread of their own encodes and writes, so that the observed engine waits for neither."""

from __future__ import annotations

import pathlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

from hkv.dialects.dialect import Dialect
from hkv.oracle.compression import open_output
from hkv.oracle.log_file import encode, part_path

PAUSE = 2e-4
"""Seconds for which the thread lets others run."""


class LogWriter:
    """A thread that writes logs.

    Attributes:
      problem: the error that ended it, or None.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hkv-log-writer", daemon=True)
        self.problem: Exception | None = None
        self._hurried = False
        self._thread.start()

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
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            try:
                task()
            except Exception as error:
                self.problem = self.problem or error


class LogFile:
    """One log, part by part.

    Args:
      path: of its first part.
      dialect: whose rules it follows.
      part_bytes: bytes, before compression, after which the next part begins; None for one part.
    """

    def __init__(self, path: pathlib.Path, dialect: Dialect, part_bytes: int | None = None) -> None:
        self.path = path
        self._dialect, self._limit = dialect, part_bytes
        self._part = self._written = 0
        self._encode = msgspec.json.Encoder().encode
        self._answered: dict[type, bool] = {}
        self._output: BinaryIO | None = None

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

    def close(self) -> None:
        """Closes the file."""
        if self._output is not None:
            self._output.close()
            self._output = None

    def _write(self, line: bytes) -> None:
        if self._limit is not None and self._written and self._written + len(line) > self._limit:
            self.close()
            self._part, self._written = self._part + 1, 0
        if self._output is None:
            self._output = open_output(part_path(self.path, self._part))
        self._output.write(line + b"\n")
        self._written += len(line) + 1

"""A child process that is spoken to line by line, neither side ever waited for longer than a timeout."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import subprocess
import time
import weakref

from hkv.errors import EngineProcessError, EngineTimeoutError
from hkv.input_file import LINES_IN_LIMIT, input_limit

PATIENCE = 1.0
"""Seconds that a process has to end by itself once its input was closed."""

RECEIVED = 1 << 16
"""Most bytes that are read at once."""


class LineProcess:
    """A process; its standard error is ours. It ends with this object at the latest, with all that it started.

    It leads a session of its own, so that what it started can be ended with it; Ctrl-C reaches HKV, which ends it.

    Args:
      command: as a shell would split it; no shell runs.
      timeout: seconds to wait for a line to be taken or given.

    Raises:
      EngineProcessError: it cannot be started.
    """

    def __init__(self, command: str, timeout: float) -> None:
        self.command = command
        self._timeout = timeout
        self._rest = b""
        try:
            arguments = shlex.split(command)
            if not arguments:
                raise ValueError("no program named")
            self._process = subprocess.Popen(
                arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
            )
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise EngineProcessError("engine", f"cmd:{command}", f"a program that starts ({reason})") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._input, False)
        os.set_blocking(self._output, False)
        self._end = weakref.finalize(self, _end, self._process)

    def ask(self, line: bytes, what: str) -> bytes:
        """Sends a line and returns the one that comes back, both without their newline.

        Args:
          line: the line.
          what: name of what is asked, for messages.

        Raises:
          EngineProcessError: the process ended, was silent for too long, or said something before it was asked.
        """
        if not self._end.alive:
            raise EngineProcessError("engine", f"cmd:{self.command}", f"a process that still runs, to answer {what}")
        try:
            self._check_silent(what)
            self._write(line + b"\n", what)
            return self._read(what)
        except EngineProcessError:
            self.close()
            raise
        except KeyboardInterrupt:
            _kill_session(self._process)  # at once: an interrupted command ends without waiting for anyone
            raise

    def close(self) -> None:
        """Ends the process: closes its input, waits a moment, kills what is left."""
        self._end()

    def _check_silent(self, what: str) -> None:
        if self._rest or select.select([self._output], [], [], 0)[0]:
            text = self._rest or self._receive(what)
            expected = f"nothing more before it is asked for {what}; one line an operation"
            raise EngineProcessError("engine wrote", _shown(text), expected)

    def _write(self, data: bytes, what: str) -> None:
        deadline = time.monotonic() + self._timeout
        while data:
            if not select.select([], [self._input], [], max(0.0, deadline - time.monotonic()))[1]:
                self._too_slow(f"{what} to be read")
            try:
                data = data[os.write(self._input, data) :]
            except BrokenPipeError:
                self._died(what)

    def _read(self, what: str) -> bytes:
        deadline = time.monotonic() + self._timeout
        longest = input_limit() // LINES_IN_LIMIT
        found = bytearray()
        while (end := found.find(b"\n", max(0, len(found) - RECEIVED))) < 0:
            if not select.select([self._output], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self._too_slow(f"an answer to {what}" + (f" beyond {_shown(found)}" if found else ""))
            self._rest = bytes(found[:RECEIVED])  # for messages, should it end now
            found += self._receive(what)
            if len(found) > longest:
                expected = f"a line of at most {longest:,} bytes, in answer to {what}"
                raise EngineProcessError("engine wrote", _shown(found), expected)
        self._rest = bytes(found[end + 1 :])
        return bytes(found[:end])

    def _receive(self, what: str) -> bytes:
        data = os.read(self._output, RECEIVED)
        if not data:
            self._died(what)
        return data

    def _too_slow(self, wanted: str) -> None:
        raise EngineTimeoutError("engine", f"silent for {self._timeout:g} seconds", wanted)

    def _died(self, what: str) -> None:
        try:
            code = self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise EngineProcessError("engine", "closed its pipes", f"an answer to {what}") from None
        half = f" after {_shown(self._rest)}" if self._rest else ""
        raise EngineProcessError("engine", f"ended with {_status(code)}{half}", f"an answer to {what}")


def _status(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _shown(data: bytes | bytearray, limit: int = 80) -> str:
    text = data[: 4 * limit].decode("utf-8", "replace").rstrip("\n")
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _end(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE)
    _kill_session(process)
    process.wait()


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kills the process and all that it started and that did not leave its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)

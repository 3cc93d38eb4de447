"""A function in a process of its own, which may die of what it does, take all memory, or never come back.

A process cannot stop a loop in its own native code, nor tell its own segmentation fault. So the function says on a pipe
what it has to say; whoever started its process waits for that as long as it may take, and ends the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import multiprocessing
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import connection
from typing import Any, Self

PATIENCE = 60.0
"""Seconds that a call may take, unless a command says otherwise."""

MEMORY = 4 << 30
"""Bytes that a process may have: a kernel's case has kilobytes, or a pool of which next to nothing exists."""

GLANCE = 0.1
"""Seconds between two looks at what a process has."""

PARENT_DEATH = 1
"""Linux's `PR_SET_PDEATHSIG`."""


class ProcessDied(Exception):  # noqa: N818
    """The function ended its process, or had to be ended; the message says how, after its name."""


class ProcessHung(ProcessDied):
    """The function did not return within so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"did not return within {seconds:g} s")


class ProcessGrew(ProcessDied):
    """The function took more than `MEMORY`."""

    def __init__(self) -> None:
        super().__init__(f"took more than {MEMORY >> 20} MiB of memory")


class Child:
    """A process that runs a function; it is ended when it fails, or with `close`.

    Args:
      function: of a module; takes its end of a pipe, and the arguments.
      arguments: whatever can be pickled.
      daemon: True to have it ended with this process where nobody calls `close`; it can start no such process itself.

    Attributes:
      over: True once the process was ended.
    """

    def __init__(self, function: Callable[..., None], *arguments: Any, daemon: bool = False) -> None:
        # A fork costs nothing, but lacks the threads of libraries that have some.
        forks = hasattr(os, "fork") and not {"jax", "torch"} & sys.modules.keys()
        context: Any = multiprocessing.get_context("fork" if forks else "spawn")
        self._pipe, theirs = context.Pipe()
        self.over, self.process = False, context.Process(target=_run, args=(function, theirs, arguments), daemon=daemon)
        self.process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process."""
        if not self.over:
            self.over = True
            self.process.kill()
            self.process.join()
            self._pipe.close()

    def ask(self, question: Any, seconds: float) -> Any:
        """Answer of the function to a question, as `heard`."""
        with contextlib.suppress(BrokenPipeError):  # it has ended since
            self._pipe.send(question)
        return self.heard(seconds)

    def heard(self, seconds: float | None) -> Any:
        """The next that the function says, within so many seconds and `MEMORY`; None for any.

        Raises:
          ProcessDied: it says nothing any more.
          Exception: whatever exception it says.
        """
        try:
            said = self._received(seconds)
        except ProcessDied:
            self.close()
            raise
        if isinstance(said, Exception):
            raise said
        return said

    def _received(self, seconds: float | None) -> Any:
        waited = [self._pipe, self.process.sentinel]
        if seconds is None:
            connection.wait(waited)
        else:
            end = time.monotonic() + seconds
            while not connection.wait(waited, min(GLANCE, max(0.0, end - time.monotonic()))):
                if time.monotonic() >= end:
                    raise ProcessHung(seconds)
                if _resident(self.process.pid) > MEMORY:
                    raise ProcessGrew
        with contextlib.suppress(EOFError, OSError):  # it may have ended within a message
            if self._pipe.poll():
                return self._pipe.recv()
        self.process.join()
        status = self.process.exitcode
        raise ProcessDied(f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}")


def _run(function: Callable[..., None], pipe: Any, arguments: tuple[Any, ...]) -> None:
    if sys.platform == "linux":  # however the process ends that started this one: nobody else would end a loop
        ctypes.CDLL(None).prctl(PARENT_DEATH, signal.SIGKILL)
    signal.set_wakeup_fd(-1)  # a fork has that of its parent, which hears of an interrupt itself, and ends this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError, BrokenPipeError):  # nobody listens any more
        function(pipe, *arguments)


def _resident(process: int) -> int:
    """Bytes of memory that a process has, as Linux tells it; else 0."""
    try:
        return int(pathlib.Path(f"/proc/{process}/statm").read_text().split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError):
        return 0

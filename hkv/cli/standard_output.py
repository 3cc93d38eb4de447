"""Standard output that cannot fail without being noticed."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator


class StandardOutputError(Exception):
    """Standard output took no more. It is no OSError, because rich and click treat broken pipes in ways of their own.

    Args:
      cause: the system's error.

    Attributes:
      closed: its reader has gone, as `head` does.
      reason: in words.
    """

    def __init__(self, cause: OSError) -> None:
        self.closed = cause.errno == errno.EPIPE
        self.reason = cause.strerror or str(cause)
        super().__init__(self.reason)


class _Watched(io.RawIOBase):
    """A descriptor that remembers its first failure, and swallows all that comes after it.

    Python writes what is buffered once more while it shuts down, where a failure is a message and exit status 120.
    """

    def __init__(self, descriptor: int | None) -> None:
        super().__init__()
        self._descriptor = descriptor
        self.failure: StandardOutputError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        if self._descriptor is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._descriptor

    def isatty(self) -> bool:
        return self._descriptor is not None and os.isatty(self._descriptor)

    def write(self, data: object) -> int:  # type: ignore[override]
        view = memoryview(data)  # type: ignore[arg-type]
        if self.failure is not None:
            return view.nbytes
        try:
            return os.write(self.fileno(), view)
        except OSError as error:
            self.failure = StandardOutputError(error)
            raise self.failure from error


@contextlib.contextmanager
def standard_output(descriptor: int | None) -> Iterator[None]:
    """Makes `sys.stdout` write to a descriptor, in its old encoding, and raise StandardOutputError where that fails.

    Characters that the encoding lacks are written as escapes. What is buffered is written on leaving, and a failure
    that was caught and forgotten in between is raised there.

    Args:
      descriptor: its file descriptor; None where the process has no standard output, which then cannot be written.
    """
    before = sys.stdout
    raw = _Watched(descriptor)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(before, "encoding", None) or "utf-8",
        errors="backslashreplace",
        line_buffering=raw.isatty(),
    )
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        finally:
            sys.stdout = before
            if raw.failure is not None:
                raise raw.failure

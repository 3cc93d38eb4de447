"""Output files: a regular file is replaced whole or not at all, a device or a pipe is written as a stream."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import secrets
import stat
from collections.abc import Iterator
from types import TracebackType

from hkv.errors import FileError


class OutputFile:
    """A file being written. A context manager: leaving it puts the file in its place, an exception leaves no trace.

    A regular file appears at `path` only when it is whole: it is written beside its place and then renamed. Through a
    symbolic link it is the link's target that is replaced. A file that is replaced hands on its mode and owner, and is
    refused where it is read-only; a new one gets its mode from the umask. Everything else that can be at a path, a
    device, a FIFO, or the `/dev/fd/N` of a shell's process substitution, is opened and written as a stream.

    Args:
      path: path of the file; its folder exists.

    Attributes:
      file: binary, buffered; its `write` raises FileError.
      target: the regular file that will be replaced, links followed; None for a stream.
      staging: path at which it is written until then; None for a stream.

    Raises:
      FileError: it cannot be written there, now or later.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.target: pathlib.Path | None = None
        self.staging: pathlib.Path | None = None
        with _named(self.path):
            target = pathlib.Path(os.path.realpath(self.path))
            found = _status(self.path)
            if found is None or (stat.S_ISREG(found.st_mode) and _is(target, found)):
                descriptor = self._stage(target, found)
            else:
                # Neither O_CREAT nor O_TRUNC: whatever stands there is not ours to make or to empty.
                descriptor = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY)
        self.file = io.BufferedWriter(_Raw(descriptor, self.path))

    def _stage(self, target: pathlib.Path, found: os.stat_result | None) -> int:
        if found is not None and not os.access(target, os.W_OK):
            raise PermissionError("Permission denied: it is read-only")
        staging = target.parent / f".hkv-{secrets.token_hex(8)}"
        descriptor = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self.target, self.staging = target, staging
        if found is not None:
            with contextlib.suppress(PermissionError):  # a file of somebody else's becomes ours, as with any rename
                os.fchown(descriptor, found.st_uid, found.st_gid)
            os.fchmod(descriptor, stat.S_IMODE(found.st_mode))
        return descriptor

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.discard()

    def close(self) -> None:
        """Writes what is buffered; a regular file is whole then, and not yet in its place."""
        with _named(self.path):
            self.file.close()

    def commit(self) -> None:
        """Puts a regular file in its place."""
        self.close()
        if self.staging is not None and self.target is not None:
            with _named(self.path):
                os.replace(self.staging, self.target)
            self.staging = None

    def discard(self) -> None:
        """Gives up what was not committed: what was at the path is still there, unless it was a stream."""
        with contextlib.suppress(OSError):
            self.file.raw.close()  # not the buffer, which would write on
        if self.staging is not None:
            self.staging.unlink(missing_ok=True)
            self.staging = None


class _Raw(io.FileIO):
    """A descriptor whose errors name the path."""

    def __init__(self, descriptor: int, path: str) -> None:
        super().__init__(descriptor, "wb")
        self._path = path

    def write(self, data: object) -> int:  # type: ignore[override]
        with _named(self._path):
            return super().write(data)  # type: ignore[arg-type, return-value]


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Turns an error of the system into one that names the path."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise FileError(path, None, "", reason, "a path that can be written, and room there") from error


def _status(path: str) -> os.stat_result | None:
    """Status of the file at a path, links followed; None if there is none, at the end of a dangling link included."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _is(path: pathlib.Path, found: os.stat_result) -> bool:
    """True if the path names that file. `/dev/fd/N` may lead to one that was deleted, or to none at all."""
    try:
        return os.path.samestat(os.stat(path), found)
    except OSError:
        return False

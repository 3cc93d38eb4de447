"""Files: untrusted inputs, and outputs that are replaced whole or not at all.

Two megabytes of gzip can hold two gigabytes, and one line can be the whole file. So what is decompressed has a budget,
a line has a greatest length, and both are refused while they are read, before memory is taken for them. The budget is
what `hkv --input-limit` or `HKV_INPUT_LIMIT` says, such as 1GiB; a document that is read whole may have half of it, a
line a sixteenth. JSON that is nested deeper than the decoder follows is refused like any other JSON that cannot be
read. A regular file is written next to its place and renamed; a device or a pipe is written as a stream.
"""

from __future__ import annotations

import collections
import contextlib
import gzip
import importlib
import io
import json
import os
import pathlib
import re
import secrets
import stat
import sys
import zlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any, BinaryIO, cast

import msgspec

from hkv.errors import FileError, MissingExtraError
from hkv.limits import parse_bytes

LIMIT = "HKV_INPUT_LIMIT"
"""Environment variable: most bytes that a compressed file may hold, as `hkv.limits.parse_bytes` takes them."""

DEFAULT_LIMIT = 1 << 28
"""Bytes, where the variable is not set: 256 MiB, and lines of 16 MiB, which hold two million token ids."""

LINES_IN_LIMIT = 16
"""Longest lines that the limit has room for."""

STANDARD_INPUT = "-"
"""The path that stands for standard input."""

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
"""First bytes of files of these formats (RFC 1952, RFC 8878): a name's suffix says nothing of a pipe."""


CHUNK = 1 << 16
"""Compressed bytes that are read at once."""

ZSTD_CHUNK = 1 << 9
"""The same for Zstandard, whose package decompresses all that it is given: four bytes can stand for 128 KiB."""


MOST_EMPTY = 1_000_000
"""Empty lines of one file: each costs as much time as one with content, and next to nothing when it is compressed."""


def input_limit() -> int:
    """Most bytes that a compressed input may hold once it is decompressed.

    Raises:
      ConfigError: the environment variable is no size.
    """
    text = os.environ.get(LIMIT)
    return parse_bytes(text, LIMIT) if text else DEFAULT_LIMIT


def shown(path: str) -> str:
    """The path as messages name it."""
    return "standard input" if path == STANDARD_INPUT else path


@contextlib.contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """The bytes of a file, decompressed where it begins as gzip or Zstandard files do.

    Everything is read once and in order, so that a pipe (`<(...)`, `/dev/stdin`) does as well as a file. The path `-`
    is standard input.

    Raises:
      FileError: it cannot be read, is not what it begins as, or holds more than `input_limit()` bytes.
      MissingExtraError: Zstandard without the package for it.
    """
    with contextlib.ExitStack() as stack:
        try:
            raw = sys.stdin.buffer if path == STANDARD_INPUT else stack.enter_context(open(path, "rb"))
            source: Any = io.BufferedReader(cast(io.RawIOBase, _Unclosed(raw)))
            file = _decompressed(source)
            if file is not source:
                file = io.BufferedReader(cast(io.RawIOBase, _Bounded(file, shown(path))), CHUNK)
            yield stack.enter_context(file)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise FileError(shown(path), None, "", str(error), "a whole compressed file") from None
        except OSError as error:
            raise FileError(shown(path), None, "", error.strerror or str(error), "a readable file") from error
        except Exception as error:
            if type(error).__name__ == "ZstdError":
                raise FileError(shown(path), None, "", str(error), "a whole Zstandard file") from None
            raise


def lines_of(file: BinaryIO, path: str) -> Iterator[bytes]:
    """The lines of a file that `opened` gave, each with its newline if it has one; `path` names it in messages.

    Raises:
      FileError: a line is longer than a sixteenth of `input_limit()`, or a million lines are empty.
    """
    longest = input_limit() // LINES_IN_LIMIT
    number = empty = 0
    while line := file.readline(longest + 1):
        number += 1
        if len(line) > longest:
            expected = f"at most {longest:,} bytes; `hkv --input-limit` raises it"
            raise FileError(shown(path), number, "", f"a line of more than {longest:,} bytes", expected)
        if len(line) == 1:
            empty += 1
            if empty > MOST_EMPTY:
                raise FileError(shown(path), number, "", f"{empty:,} empty lines", "lines with content")
        yield line


def read_whole(path: str) -> bytes:
    """The content of a document that has to be in memory at once, decompressed.

    Raises:
      FileError: it cannot be read, or has more than half of `input_limit()` bytes, compressed or not.
      MissingExtraError: Zstandard without the package for it.
    """
    with opened(path) as file:
        limit = input_limit() // 2
        content = file.read(limit + 1)
    if len(content) > limit:
        raise _too_much(shown(path), limit)
    return content


def decode_json(text: bytes, path: str, line: int | None, expected: str, kind: Any = Any) -> Any:
    """The value that JSON in UTF-8 stands for, decoded to the type `kind`.

    Raises:
      FileError: it is not what was `expected`, or is nested deeper than can be followed; names the path and the line.
    """
    try:
        found = msgspec.json.decode(text, type=kind)
        refuse_repeated(text, found, shown(path), line)
        return found
    except RecursionError:
        problem = "nested too deeply"
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        problem = str(error)
    told = text[:80].decode("utf-8", "replace").strip()
    raise FileError(shown(path), line, "", told, f"{expected} ({problem})") from None


def refuse_repeated(text: bytes, found: Any, path: str, line: int | None) -> None:
    """Make sure that no object in a JSON text, which was read as `found`, has two values of one name.

    Raises:
      FileError: one has; names the name.
    """

    def once(pairs: list[tuple[str, Any]]) -> None:
        for name, times in collections.Counter(name for name, _ in pairs).items():
            if times > 1:
                raise FileError(path, line, name, f"{times} values", "one value of a name in an object")

    if text.count(b":") != _names_in(found):  # colons stand behind names, and in strings
        json.loads(text, object_pairs_hook=once)


def _names_in(found: Any) -> int:
    """Number of names in all objects of a JSON value."""
    if type(found) is dict:
        return len(found) + sum(_names_in(each) for each in found.values() if type(each) in (dict, list))
    if type(found) is list:
        return sum(_names_in(each) for each in found if type(each) in (dict, list))
    return 0


def _too_much(path: str, limit: int) -> FileError:
    found = f"more than {limit:,} bytes of content"
    return FileError(path, None, "", found, "no more; `hkv --input-limit` raises it")


class _Bounded(io.RawIOBase):
    """Decompressed content, refused once it is more than the limit."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._file, self._path = file, path
        self._limit = self._left = input_limit()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        count = cast(Any, self._file).readinto1(buffer)
        self._left -= count
        if self._left < 0:
            raise _too_much(self._path, self._limit)
        return count


def _decompressed(file: io.BufferedReader) -> BinaryIO:
    begins = file.peek(len(ZSTD))
    if begins.startswith(GZIP):
        return cast(BinaryIO, gzip.GzipFile(fileobj=file))
    if not begins.startswith(ZSTD):
        return file
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError:
        raise MissingExtraError("zstandard", "traces", "to read what Zstandard compressed") from None
    return cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, _Zstandard(file, zstandard.ZstdDecompressor()))))


class _Zstandard(io.RawIOBase):
    """The content of one frame after the other.

    The package's own reader of streams takes a file that was cut off for a whole one.
    """

    def __init__(self, file: io.BufferedReader, package: Any) -> None:
        self._file, self._package = file, package
        self._frame: Any = None
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self._rest:
            data = self._file.read(ZSTD_CHUNK)
            if not data:
                if self._frame is not None:
                    raise EOFError("it ends before its last frame does")
                return 0
            self._rest = memoryview(b"".join(self._decompressed(data)))
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count

    def _decompressed(self, data: bytes) -> Iterator[bytes]:
        while data:
            self._frame = self._frame or self._package.decompressobj()
            yield self._frame.decompress(data)
            if not self._frame.eof:
                return
            data, self._frame = self._frame.unused_data, None


class _Unclosed(io.RawIOBase):
    """A stream that its opener closes."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        data = self._stream.read(len(buffer))  # waits for all of it, or the end: a pipe may bring a byte at a time
        buffer[: len(data)] = data
        return len(data)


# Files that are written.


class OutputFile:
    """A file being written. A context manager: leaving it puts the file in its place, an exception leaves no trace.

    A regular file appears at `path` only when it is whole: it is written next to its place and then renamed. Through a
    symbolic link it is the link's target that is replaced. A file that is replaced hands on its mode and owner, and is
    refused where it is read-only; a new one gets its mode from the umask. Everything else that can be at a path, a
    device, a FIFO, or the `/dev/fd/N` of a shell's process substitution, is opened and written as a stream.

    Its `file` is binary and buffered. `target` is the regular file that will be replaced, links followed, and `staging`
    the path at which it is written until then; both are None for a stream. A FileError says that it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.target: pathlib.Path | None = None
        self.staging: pathlib.Path | None = None
        with naming(self.path):
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
        with naming(self.path):
            self.file.close()

    def commit(self) -> None:
        """Puts a regular file in its place."""
        self.close()
        if self.staging is not None and self.target is not None:
            with naming(self.path):
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
        with naming(self._path):
            return super().write(data)  # type: ignore[arg-type, return-value]


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Turns an error of the system into one that names the path."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise FileError(path, None, "", reason, "a path that can be written, and room there") from error


def _status(path: str) -> os.stat_result | None:
    """Status of the file at a path, links followed; None if nothing is there, or only a dangling link."""
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


# Texts of others, as they are shown.

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""Characters that a terminal obeys, or that turn the order of others, but for the end of a line and the tabulator."""


def printable(text: str) -> str:
    """A text whose control characters are escapes in words: ids, paths and errors may be anybody's."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)

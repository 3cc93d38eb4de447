"""Input files: a file, a pipe or standard input, compressed or not, of which nobody knows who wrote it.

Two megabytes of gzip can hold two gigabytes, and one line can be the whole file. So what is decompressed has a budget,
a line has a greatest length, and both are refused while they are read, before memory is taken for them. The budget is
what `hkv --input-limit` or `HKV_INPUT_LIMIT` says, such as 1GiB; a document that is read whole may have half of it, a
line a sixteenth. JSON that is nested deeper than the decoder follows is refused like any other JSON that cannot be
read.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib
import io
import os
import sys
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import msgspec

from hkv.byte_size import parse_bytes
from hkv.errors import FileError, MissingExtraError

LIMIT = "HKV_INPUT_LIMIT"
"""Environment variable: most bytes that a compressed file may hold, as `hkv.byte_size.parse_bytes` takes them."""

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

    Everything is read once and in order, so that a pipe (`<(...)`, `/dev/stdin`) does as well as a file.

    Args:
      path: the file; `-` is standard input.

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
    """The lines of a file, each with its newline if it has one.

    Args:
      file: as `opened` gives it.
      path: the file, for messages only.

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
    """The value that JSON stands for.

    Args:
      text: the JSON, in UTF-8.
      path: the file it is from, for messages.
      line: its line there, from 1; None for the whole file.
      expected: what it should be, in words.
      kind: type to decode to.

    Raises:
      FileError: it is no such JSON, or is nested deeper than can be followed.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError:
        problem = "nested too deeply"
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        problem = str(error)
    told = text[:80].decode("utf-8", "replace").strip()
    raise FileError(shown(path), line, "", told, f"{expected} ({problem})") from None


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

"""Opens what a trace is read from: a file, a pipe or standard input, compressed or not."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import io
import sys
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from hkv.errors import FileError, MissingExtraError

STANDARD_INPUT = "-"
"""The path that stands for standard input."""

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
"""First bytes of files of these formats (RFC 1952, RFC 8878): a name's suffix says nothing of a pipe."""


CHUNK = 1 << 16
"""Compressed bytes that are read at once."""


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
      FileError: it cannot be read, or is not what it begins as.
      MissingExtraError: Zstandard without the package for it.
    """
    with contextlib.ExitStack() as stack:
        try:
            raw = sys.stdin.buffer if path == STANDARD_INPUT else stack.enter_context(open(path, "rb"))
            yield stack.enter_context(_decompressed(io.BufferedReader(cast(io.RawIOBase, _Unclosed(raw)))))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise FileError(shown(path), None, "", str(error), "a whole compressed file") from None
        except OSError as error:
            raise FileError(shown(path), None, "", error.strerror or str(error), "a readable file") from error
        except Exception as error:
            if type(error).__name__ == "ZstdError":
                raise FileError(shown(path), None, "", str(error), "a whole Zstandard file") from None
            raise


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
            data = self._file.read(CHUNK)
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

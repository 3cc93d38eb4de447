"""Logs as compressed files: gzip and Zstandard, by the ends of their names."""

from __future__ import annotations

import gzip
import importlib
import pathlib
from typing import Any, BinaryIO, cast

from hkv.errors import FileError, MissingExtraError

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
"""Ends of the names of logs."""

_GZIP, _ZSTANDARD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


def open_output(path: pathlib.Path) -> BinaryIO:
    """A new file to write a log to, compressed as its name says.

    Raises:
      MissingExtraError: it is to be a Zstandard file, and there is no package for that.
    """
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "wb", compresslevel=4))
    if path.suffix == ".zst":
        return cast(BinaryIO, zstandard().open(path, "wb"))
    return path.open("wb")


def decompressed(data: bytes, path: str) -> bytes:
    """Content of a file, decompressed if its first bytes say that it is compressed.

    Raises:
      FileError: it is damaged.
      MissingExtraError: it is a Zstandard file, and there is no package for that.
    """
    if data.startswith(_GZIP):
        try:
            return gzip.decompress(data)
        except (OSError, EOFError) as error:
            raise FileError(path, None, "", str(error), "a whole gzip file") from error
    if data.startswith(_ZSTANDARD):
        library = zstandard()
        try:
            with library.ZstdDecompressor().stream_reader(data, read_across_frames=True) as reader:
                return reader.read()
        except library.ZstdError as error:
            raise FileError(path, None, "", str(error), "a whole Zstandard file") from error
    return data


def zstandard() -> Any:
    """The package of that name.

    Raises:
      MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module("zstandard")
    except ImportError:
        raise MissingExtraError("zstandard", "traces", "for logs that end in .zst") from None

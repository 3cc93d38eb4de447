"""Logs written as compressed files: gzip and Zstandard, by the ends of their names."""

from __future__ import annotations

import gzip
import importlib
import pathlib
from typing import Any, BinaryIO, cast

from hkv.errors import MissingExtraError

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
"""Ends of the names of logs."""


def open_output(path: pathlib.Path) -> BinaryIO:
    """A new file to write a log to, compressed as its name says.

    Raises:
      MissingExtraError: it is to be a Zstandard file, and there is no package for that.
    """
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "wb", compresslevel=4))
    if path.suffix == ".zst":
        return cast(BinaryIO, zstandard().open(path, "wb"))
    return cast(BinaryIO, path.open("wb", buffering=0))


def zstandard() -> Any:
    """The package of that name.

    Raises:
      MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module("zstandard")
    except ImportError:
        raise MissingExtraError("zstandard", "traces", "for logs that end in .zst") from None

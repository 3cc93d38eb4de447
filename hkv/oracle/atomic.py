"""Writes files whole or not at all."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Mapping

from hkv.errors import FileError
from hkv.output_file import OutputFile


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Replaces the file at `path`, making its folder if need be; a reader sees the old bytes or all of the new ones.

    A device or a pipe at `path` is written as a stream: `hkv.output_file.OutputFile` says what counts as which.

    Raises:
      FileError: it cannot be written there.
    """
    write_all_atomically({path: data})


def write_all_atomically(files: Mapping[str | os.PathLike[str], bytes]) -> None:
    """Replaces several files once all of them are written beside their places, making folders if need be.

    Args:
      files: contents by path.

    Raises:
      FileError: one cannot be written; none was replaced then.
    """
    with contextlib.ExitStack() as stack:
        opened: list[OutputFile] = []
        for path, data in files.items():
            _make_folder(pathlib.Path(path))
            output = OutputFile(path)
            stack.callback(output.discard)
            opened.append(output)
            output.file.write(data)
            output.close()
        for output in opened:
            output.commit()


def _make_folder(path: pathlib.Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise FileError(str(path), None, "", reason, "a path that can be written, and room there") from error

"""Writes a file whole or not at all."""

from __future__ import annotations

import os
import pathlib
import tempfile

from hkv.errors import FileError


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Replaces the file at `path`, making its folder if need be; a reader sees the old bytes or all of the new ones.

    Raises:
      FileError: it cannot be written there.
    """
    target = pathlib.Path(path)
    temporary = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except OSError as error:
        if temporary is not None:
            pathlib.Path(temporary).unlink(missing_ok=True)
        raise FileError(str(path), None, "", error.strerror or str(error), "a path that can be written") from error

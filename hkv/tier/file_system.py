"""The calls by which the disk tier changes a disk, in one place, so that a test can stop each of them."""

from __future__ import annotations

import os
import pathlib


class FileSystem:
    """Plain calls. A subclass may fail, or kill the process, at any of them."""

    def open(self, path: pathlib.Path) -> int:
        """Creates a file that must not exist yet and returns its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Writes some of `data`, at least one byte; returns how many."""
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        """Returns when the file is on the disk."""
        os.fsync(descriptor)

    def replace(self, source: pathlib.Path, target: pathlib.Path) -> None:
        """Renames atomically, over the target if there is one."""
        os.replace(source, target)

    def unlink(self, path: pathlib.Path) -> None:
        """Removes a file that may be gone already."""
        path.unlink(missing_ok=True)

    def sync_folder(self, folder: pathlib.Path) -> None:
        """Returns when the folder's entries are on the disk."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

"""Chunk objects on disk: one safetensors file each, checksummed, renamed into place, bounded in bytes.

A process may die at any point. What is then half-written never carries an object's name; what is damaged later fails
its checksum. Either is reported, moved to `quarantine/`, and is a miss: it is never returned.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from hkv.errors import FileError, MissingExtraError, OperationError
from hkv.tier.tier import Tier, check_flat

FORMAT = "hkv-chunk-1"
MAX_KEY_BYTES = 100
SUFFIX = ".safetensors"
PARTIAL_SUFFIX = ".partial"


@dataclasses.dataclass(frozen=True)
class StoredObject:
    """An object as it was stored: `data` uint8 `[bytes]`, read-only, and the caller's `metadata`."""

    data: np.ndarray
    metadata: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Incident:
    """A file that was not what it should be: its name, what was wrong, and where it was moved."""

    name: str
    reason: str
    quarantined: pathlib.Path


class DiskTier(Tier):
    """Flat chunk objects by key in a folder, evicted least recently used first; the order survives a restart.

    One process at a time may have a folder open. Objects, files in quarantine and file headers all count towards
    `capacity_bytes`; only while an object is being replaced do it and its successor both lie there.

    Raises:
      FileError: the folder cannot be used, or another process has it open.
    """

    def __init__(
        self, folder: str | os.PathLike[str], capacity_bytes: int, file_system: FileSystem | None = None
    ) -> None:
        _safetensors()
        self.folder = pathlib.Path(folder)
        self.quarantine = self.folder / "quarantine"
        self.incidents: list[Incident] = []
        self._files = file_system or FileSystem()
        super().__init__(capacity_bytes)
        self._serial = 0
        try:
            self.quarantine.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(str(folder), None, "", error.strerror, "a folder that can be written") from None
        self._lock = _lock_folder(self.folder)
        self._scan()

    def close(self) -> None:
        """Lets another process open the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> DiskTier:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def store(self, key: bytes, data: np.ndarray, metadata: Mapping[str, str] = MappingProxyType({})) -> bool:
        """Writes uint8 `[bytes]`, evicting others as needed. It is on the disk when this returns True.

        A key has 1 to 100 bytes; `metadata` are strings that come back with it, e.g. a layout fingerprint. False, with
        nothing changed, when it cannot fit next to the pinned objects, or would replace a pinned one.
        """
        _check_key(key)
        check_flat(data)
        content = _encode(key, data, metadata)
        if not self._make_room(key, len(content)):
            return False
        self._write(self._path(key), content)
        self._order.add(key, len(content))
        self._trim_quarantine()
        return True

    def retrieve(self, key: bytes) -> StoredObject | None:
        """The object, and the most recently used from now on; None when absent, unreadable or damaged."""
        if key not in self._order:
            return None
        path = self._path(key)
        try:
            stored = _decode(path, key)
        except _DamagedError as damage:
            self._forget(key)
            self._put_away(path, str(damage))
            return None
        os.utime(path)
        self._order.touch(key)
        return stored

    def _discard(self, key: bytes) -> None:
        self._files.unlink(self._path(key))

    def _path(self, key: bytes) -> pathlib.Path:
        return self.folder / f"{key.hex()}{SUFFIX}"

    def _write(self, path: pathlib.Path, content: bytes) -> None:
        self._serial += 1
        partial = self.folder / f"{os.getpid()}-{self._serial}{PARTIAL_SUFFIX}"
        descriptor = self._files.open(partial)
        try:
            try:
                rest = memoryview(content)
                while rest:
                    rest = rest[self._files.write(descriptor, rest) :]
                self._files.fsync(descriptor)
            finally:
                os.close(descriptor)
            self._files.replace(partial, path)
        except OSError:
            self._files.unlink(partial)
            raise
        self._files.sync_folder(self.folder)

    def _forget(self, key: bytes) -> None:
        while self._order.pinned(key):
            self._order.unpin(key)
        self._order.remove(key)

    def _put_away(self, path: pathlib.Path, reason: str) -> None:
        target = self.quarantine / path.name
        if path.exists():
            self._files.replace(path, target)
        self.incidents.append(Incident(path.name, reason, target))
        self._trim_quarantine()

    def _trim_quarantine(self) -> None:
        """Deletes the oldest files in quarantine until they fit next to the objects."""
        stats = sorted(
            ((entry.stat(), entry) for entry in self.quarantine.iterdir()), key=lambda item: item[0].st_mtime_ns
        )
        total = sum(stat.st_size for stat, _ in stats)
        for stat, entry in stats:
            if self._order.used_bytes + total <= self._order.capacity_bytes:
                return
            self._files.unlink(entry)
            total -= stat.st_size

    def _scan(self) -> None:
        """Takes stock of the folder: objects by age into the order, everything else into quarantine."""
        found: list[tuple[int, bytes, int]] = []
        for path in sorted(self.folder.iterdir()):
            if path.name in ("quarantine", "lock"):
                continue
            key = _key_of(path)
            if key is None:
                self._put_away(path, "half-written" if path.suffix == PARTIAL_SUFFIX else "not a chunk object")
                continue
            stat = path.stat()
            found.append((stat.st_mtime_ns, key, stat.st_size))
        for _, key, size in sorted(found):
            victims = self._order.victims(size)
            if victims is None:
                self._files.unlink(self._path(key))
                continue
            for victim in victims:
                self.evict(victim)
            self._order.add(key, size)
        self._trim_quarantine()


class _DamagedError(Exception):
    pass


def _check_key(key: bytes) -> None:
    if not isinstance(key, bytes) or not 1 <= len(key) <= MAX_KEY_BYTES:
        raise OperationError("key", key, f"1 to {MAX_KEY_BYTES} bytes")


def _key_of(path: pathlib.Path) -> bytes | None:
    if path.suffix != SUFFIX or not path.is_file():
        return None
    try:
        key = bytes.fromhex(path.stem)
    except ValueError:
        return None
    return key if 1 <= len(key) <= MAX_KEY_BYTES and key.hex() == path.stem else None


def _checksum(key: bytes, data: bytes | memoryview, metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps([FORMAT, key.hex(), dict(sorted(metadata.items()))]).encode())
    digest.update(data)
    return digest.hexdigest()


def _encode(key: bytes, data: np.ndarray, metadata: Mapping[str, str]) -> bytes:
    data = np.ascontiguousarray(data)
    header = {
        "format": FORMAT,
        "key": key.hex(),
        "sha256": _checksum(key, data.data, metadata),
        "metadata": json.dumps(dict(sorted(metadata.items()))),
    }
    return _safetensors().numpy.save({"data": data}, metadata=header)


def _decode(path: pathlib.Path, key: bytes) -> StoredObject:
    try:
        with _safetensors().safe_open(path, framework="np") as file:
            header = file.metadata() or {}
            data = file.get_tensor("data")
    except (OSError, _safetensors().SafetensorError) as error:
        raise _DamagedError(f"unreadable: {error}") from None
    if header.get("format") != FORMAT or header.get("key") != key.hex():
        raise _DamagedError("not this object: its header names another format or key")
    try:
        metadata = json.loads(header.get("metadata", ""))
    except (ValueError, RecursionError):
        raise _DamagedError("its metadata is not JSON") from None
    if data.dtype != np.uint8 or data.ndim != 1 or not isinstance(metadata, dict):
        raise _DamagedError("not a flat uint8 array")
    if header.get("sha256") != _checksum(key, data.data, metadata):
        raise _DamagedError("its checksum does not match")
    data.flags.writeable = False
    return StoredObject(data, MappingProxyType(metadata))


def _lock_folder(folder: pathlib.Path) -> int:
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise FileError(str(folder), None, "", "locked", "a folder that no other process has open") from None
    return descriptor


def _safetensors() -> Any:
    """The package, asked for when a tier is made: what only names this module does without it."""
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise MissingExtraError("safetensors", "disk", "to keep chunk objects on disk") from error
    return safetensors


# The calls by which the disk tier changes a disk, in one place, so that a test can stop each of them.


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

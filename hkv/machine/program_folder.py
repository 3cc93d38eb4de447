"""Folder of compiled programs: nobody else may write there, and each program is sealed with a key of the user's own.

A kept program is native code inside a pickle: reading one is running it. A folder is therefore used only if it, and
what is in it, belongs to the user, and no one else can write to it or put another in its place. That is checked once,
at the start of a command, and of each file again when it is read. A copied folder would pass, files of a stranger and
all: so a program is preceded by an HMAC-SHA256 of its name and contents, under a key that lies in the user's own folder
(`user_folder`), readable by the user alone, and is made anew where that does not match. JAX's own cache shares the
folder; its files are protected by their and the folder's ownership, not by the key.

Owners and modes are POSIX's; on Windows the folder is the user's profile, which the system protects.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import pathlib
import secrets
import stat
import sys

KEY_NAME, KEY_BYTES = "programs.key", 32

SEAL_BYTES = hashlib.sha256().digest_size


def user_folder() -> pathlib.Path | None:
    """The user's folder for what can be made again, by the conventions of the platform, or None."""
    try:
        home = pathlib.Path.home()
    except RuntimeError:
        return None
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "hkv"
    variable, fallback = ("LOCALAPPDATA", home) if sys.platform == "win32" else ("XDG_CACHE_HOME", home / ".cache")
    named = pathlib.Path(os.environ.get(variable, ""))
    return (named if named.is_absolute() else fallback) / "hkv"


def distrusted(folder: pathlib.Path) -> str | None:
    """The reason why somebody else may have put a file into a folder that exists; None if nobody can have.

    Args:
      folder: symbolic links are followed.
    """
    if not hasattr(os, "geteuid"):
        return None
    folder = folder.resolve()
    closed = stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0
    for path in (folder, *folder.iterdir()):
        with contextlib.suppress(FileNotFoundError):  # removed by another process meanwhile
            # Not `stat`: a link is judged as a link, and what it points to is checked when it is read.
            found = path.lstat()
            if found.st_uid != os.geteuid():
                return f"{path} belongs to another user"
            if found.st_mode & 0o022 and not (closed and path != folder) and not stat.S_ISLNK(found.st_mode):
                return f"others may write to {path} (chmod 700 {folder})"
    for parent in folder.parents:
        found = parent.stat()
        if found.st_uid not in (0, os.geteuid()):
            return f"{parent}, above it, belongs to another user"
        others = found.st_mode & (0o002 if found.st_gid == os.getegid() else 0o022)
        if others and not found.st_mode & stat.S_ISVTX:
            return f"others may write to {parent}, above it"
    return None


def user_key() -> bytes | None:
    """The user's key, made at first use; None where there is no folder for it, or others may know it.

    Raises:
      OSError: it cannot be read or made.
    """
    folder = user_folder()
    if folder is None:
        return None
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / KEY_NAME
    with contextlib.suppress(FileNotFoundError):
        return read_own(path, forbidden=0o077)
    staging = path.with_name(f".{KEY_NAME}.{secrets.token_hex(8)}")
    try:
        write_new(staging, secrets.token_bytes(KEY_BYTES))
        with contextlib.suppress(FileExistsError):  # another process was first: its key is everybody's
            os.link(staging, path)
    finally:
        staging.unlink(missing_ok=True)
    return read_own(path, forbidden=0o077)


def write_new(path: pathlib.Path, contents: bytes) -> None:
    """Writes a file that does not exist yet, for the user alone.

    Raises:
      OSError: something is there already, or it cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    with open(os.open(path, flags, 0o600), "wb") as file:
        file.write(contents)


def read_own(path: pathlib.Path, forbidden: int = 0o022) -> bytes | None:
    """Content of a regular file that belongs to the user; None if it is another's, or its mode has `forbidden` bits.

    Raises:
      OSError: it cannot be read.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    with open(os.open(path, flags), "rb") as file:
        found = os.fstat(file.fileno())
        if hasattr(os, "geteuid"):
            regular = stat.S_ISREG(found.st_mode)
            if not regular or found.st_uid != os.geteuid() or found.st_mode & forbidden:
                return None
        return file.read()


def sealed(name: str, contents: bytes, key: bytes) -> bytes:
    """A program's file: the seal over its name and contents, then the contents."""
    return _seal(name, contents, key) + contents


def unsealed(name: str, written: bytes, key: bytes) -> bytes | None:
    """Contents of a program's file; None if it was not sealed under this name with this key."""
    contents = written[SEAL_BYTES:]
    return contents if hmac.compare_digest(written[:SEAL_BYTES], _seal(name, contents, key)) else None


def _seal(name: str, contents: bytes, key: bytes) -> bytes:
    return hmac.digest(key, name.encode() + b"\0" + contents, "sha256")

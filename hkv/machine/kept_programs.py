"""Executables that outlive the process: a large program is traced and lowered once, not once a command.

JAX's own compilation cache is asked for a program by its HLO, so a program has to be traced and lowered before it is
found: two of the three seconds of a small replay. Here the question is what the program is made from: HKV's sources,
JAX and its settings, the machine, the shapes of the arguments. An answer is the executable as
`jax.experimental.serialize_executable` writes it.

Nothing is kept unless the environment variable `HKV_PROGRAM_FOLDER` names a folder, as the command line sees to
(`hkv.cli`). Loading an executable is running its code: only a file of the user's own, sealed with the
user's key, is loaded (`hkv.machine.program_folder`). Code that is patched after it was imported is not seen; whoever
does that keeps nothing.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pathlib
import platform
import secrets
import sys
import threading
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jaxlib.version
from jax.experimental import serialize_executable

from hkv.machine.program_folder import read_own, sealed, unsealed, user_key, write_new

FOLDER = "HKV_PROGRAM_FOLDER"
"""Environment variable: the folder in which executables are kept; nothing is kept where it is empty or not set."""

LEAST_SECONDS, NEVER = "jax_persistent_cache_min_compile_time_secs", 1e9
"""JAX's setting: programs that compile faster are not put into its cache; seconds that no compilation takes."""

EDITED = "HKV_EDITED_SOURCE"
"""Environment variable of judges of `hkv mutate`: a source is not what its file has, so that nothing is kept."""

SUFFIX = ".executable"

MAX_SIZE = 1 << 28
"""Bytes of the folder's executables together; those that were used longest ago go. That of a replay has 1.5 MB."""


class KeptProgram:
    """A jitted function, whose executables are kept in the folder that `HKV_PROGRAM_FOLDER` names, if it names one.

    Args:
      function: the function, with positional arguments alone, arrays at the leaves.
      donated: positions of the arguments that are donated.
      name: names the function and all that is static in it.
      returns: makes from the arguments any value of the structure that the function returns.
      packages: imported packages, or modules in none, beside HKV from whose sources the function is made.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        donated: tuple[int, ...],
        name: str,
        returns: Callable[..., Any],
        packages: tuple[str, ...] = (),
    ) -> None:
        self._function, self._donated, self._name, self._returns = function, donated, name, returns
        self._packages = ("hkv", *packages)
        self._jitted: Any = jax.jit(function, donate_argnums=donated)
        self._loaded: dict[Any, Callable[..., Any]] = {}
        self._loading = threading.Lock()

    def __call__(self, *arguments: Any) -> Any:
        """Runs the function, compiled for the shapes and dtypes of its arguments."""
        folder = os.environ.get(FOLDER)
        if not folder or EDITED in os.environ:
            return self._jitted(*arguments)
        leaves, structure = jax.tree.flatten((arguments, {}))
        shapes = (structure, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves))
        with self._loading:  # several threads replay at once, and one of them loads the program for all
            if shapes not in self._loaded:
                self._loaded[shapes] = self._executable(pathlib.Path(folder), arguments, shapes)
        return self._loaded[shapes](*arguments)

    def _executable(self, folder: pathlib.Path, arguments: Any, shapes: Any) -> Callable[..., Any]:
        path = folder / f"{self._name}-{_digest(_made_from(self._packages), self._name, repr(shapes))}{SUFFIX}"
        with contextlib.suppress(Exception):  # absent, damaged, or of a machine that this one is not: made again
            written = _read(path)
            returned = jax.tree.structure(self._returns(*arguments))
            loaded = serialize_executable.deserialize_and_load(
                written, shapes[0], returned, execution_devices=jax.devices()[:1]
            )
            os.utime(path)  # the time of use, by which `keep` removes
            return loaded
        compiled = self._compiled(*arguments)
        with contextlib.suppress(Exception):  # what cannot be written is made again, too
            written, _, _ = serialize_executable.serialize(compiled)
            key = user_key()
            if key is not None:
                keep(path, sealed(path.name, zlib.compress(written, 1), key))
        return compiled

    def _compiled(self, *arguments: Any) -> jax.stages.Compiled:
        """The executable, compiled here and now.

        XLA:CPU's executables lose functions when they are read from JAX's cache and written once more (jaxlib 0.10.2):
        a name of its own keeps this program from being found there, and a limit from being put there.
        """

        def named(*given: Any) -> Any:
            return self._function(*given)

        named.__name__ = f"{self._name}-{secrets.token_hex(8)}"
        limit = jax.config.values[LEAST_SECONDS]
        jax.config.update(LEAST_SECONDS, NEVER)
        try:
            return jax.jit(named, donate_argnums=self._donated).lower(*arguments).compile()
        finally:
            jax.config.update(LEAST_SECONDS, limit)

    def lower(self, *arguments: Any) -> jax.stages.Lowered:
        """The program for such arguments, not compiled yet."""
        return self._jitted.lower(*arguments)

    def compilations(self) -> int:
        """Number of executables that calls compiled or loaded."""
        return len(self._loaded) + self._jitted._cache_size()


def _read(path: pathlib.Path) -> bytes:
    """The executable in a file of the user's own.

    Raises:
      Exception: it does not exist, belongs to somebody else, or is not sealed with the user's key.
    """
    key, written = user_key(), read_own(path)
    contents = None if key is None or written is None else unsealed(path.name, written, key)
    if contents is None:
        raise PermissionError(path)
    return zlib.decompress(contents)


def keep(path: pathlib.Path, contents: bytes, limit: int = MAX_SIZE) -> None:
    """Writes a file whole or not at all, and removes those of its folder that were used longest ago.

    Args:
      path: where; files beside it that end in `SUFFIX` count.
      contents: bytes of the file.
      limit: most bytes of all of them together.

    Raises:
      OSError: it cannot be written.
    """
    staging = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        write_new(staging, contents)
        # A rename is atomic: whoever reads meanwhile finds the old file or the new one, whole.
        staging.replace(path)
    finally:
        staging.unlink(missing_ok=True)
    used = sorted(((file.stat(), file) for file in path.parent.glob(f"*{SUFFIX}")), key=lambda each: -each[0].st_mtime)
    size = 0
    for status, file in used:
        size += status.st_size
        if size > limit and file != path:
            file.unlink(missing_ok=True)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@functools.cache
def _made_from(packages: tuple[str, ...]) -> str:
    """Digest of all that a program is made from but its arguments."""
    sources = hashlib.sha256()
    for package in packages:
        file = pathlib.Path(str(sys.modules[package].__file__))
        folder = file.parent
        for source in sorted(folder.rglob("*.py")) if hasattr(sys.modules[package], "__path__") else [file]:
            sources.update(f"{package}/{source.relative_to(folder)}\0".encode() + source.read_bytes() + b"\0")
    device = jax.devices()[0]
    # Where compiled programs lie, and how long they are kept, does not change what they are.
    settings = {name: value for name, value in jax.config.values.items() if "cache" not in name}
    return _digest(
        sources.hexdigest(),
        jax.__version__,
        jaxlib.version.__version__,
        f"{device.client.platform_version} {device.device_kind} {len(jax.devices())}",
        f"{platform.machine()} {_processor()}",
        os.environ.get("XLA_FLAGS", ""),
        repr(sorted(settings.items(), key=lambda item: item[0])),
    )


def _processor() -> str:
    """Features of the processor, where the system names them: an executable is made for these."""
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()

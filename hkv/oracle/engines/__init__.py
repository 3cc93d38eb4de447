"""The engines that commands can drive, by name; each module is imported only when its engine is asked for."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pathlib
import sys
from types import ModuleType
from typing import Any

from hkv.errors import ConfigError, HKVError
from hkv.oracle.engine import EngineFactory

ENGINES = {
    "numpy": "hkv.dialects.vllm.engines.numpy:numpy_engine",
    "jax": "hkv.oracle.engines.compiled:jax_engine",
    "vllm": "hkv.dialects.vllm.engines.installed:InstalledVllmEngine",
}
"""Engine names and where their factories live, as `module:attribute`."""

RELEASED = "vllm@"
"""Begins the name of an installed vLLM of any version, which follows: `vllm@0.34.0`."""

FORMS = (
    f"{', '.join(ENGINES)}, {RELEASED}VERSION for another than 0.33, 'cmd:PROGRAM ARGS' (docs/oplog.md), or "
    "FILE.py:CLASS or MODULE:CLASS (an Engine)"
)
"""How an engine may be named, for help texts and errors."""


def engine_factory(name: str, timeout: float | None = None) -> EngineFactory:
    """The factory of the engine of that name.

    Args:
      name: a key of `ENGINES`; `vllm@` and the version of the installed vLLM, whichever it is; `cmd:` and a command
        line, for an engine in a process of its own; or `FILE.py:NAME` or `MODULE:NAME`, for a class or function of the
        user's that takes a header.
      timeout: seconds that an engine in a process of its own may take for one answer; None for the default.

    Raises:
      ConfigError: there is no such engine.
      MissingExtraError: the engine needs a package that is not installed.
    """
    from hkv.oracle.engines import process

    if name.startswith(process.PREFIX):
        command = name.removeprefix(process.PREFIX).strip()
        if not command:
            raise ConfigError("engine", name, "a command line after cmd:")
        return process.process_factory(command, process.TIMEOUT if timeout is None else timeout)
    if name.startswith(RELEASED):
        installed: Any = engine_factory("vllm")
        return functools.partial(installed, release=name.removeprefix(RELEASED))
    module, separator, attribute = ENGINES.get(name, name).rpartition(":")
    if not separator or not module or not attribute:
        raise ConfigError("engine", name, f"one of {FORMS}")
    return _attribute(name, _module(name, module), attribute)


def _module(name: str, module: str) -> ModuleType:
    try:
        if module.endswith(".py"):
            return _load(pathlib.Path(module))
        return importlib.import_module(module)
    except HKVError:
        raise
    except Exception as error:
        if name in ENGINES:
            raise
        raise ConfigError("engine", name, f"a module that can be imported ({type(error).__name__}: {error})") from error


def _load(path: pathlib.Path) -> ModuleType:
    """The module that a file is; its neighbours can be imported, as when it is run."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    path = path.resolve()
    name = f"hkv_engine:{path}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _attribute(name: str, module: ModuleType, attribute: str) -> Any:
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError("engine", name, f"a class or function {attribute} in {module.__name__}, taking a header")
    return found

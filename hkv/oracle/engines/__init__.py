"""The engines that commands can drive, by name; each module is imported only when its engine is asked for."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pathlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from hkv.contract import registry
from hkv.contract.answer import EngineFactory
from hkv.errors import ConfigError, HKVError

REFERENCE = "numpy"
"""Name that a dialect gives to its reference."""


def built_in() -> tuple[str, ...]:
    """Names of built-in engines, of every dialect."""
    return tuple(dict.fromkeys(name for dialect in registry.dialects() for name in dialect.engines))


def trusted_first(engines: Sequence[Any], dialect: str) -> tuple[Any, Any]:
    """Two engines, the one that counts and the one in doubt, whichever was named first.

    A reference counts before any other engine, HKV's compiled form before engines of others: those that drive an
    installed package, run in a process or are somebody's class. Of two of one standing, the second counts.

    Args:
      engines: names, or factories.
      dialect: name of the dialect.
    """
    rules = registry.dialect_of(dialect)

    def standing(engine: Any) -> int:
        own = [name for name in rules.engines if name not in rules.engine_versions]
        names = [engine] if isinstance(engine, str) else [name for name in own if rules.engine(name) is engine]
        return max((1 + (name == REFERENCE) for name in names if name in own), default=0)

    first, second = engines
    return (first, second) if standing(first) > standing(second) else (second, first)


def forms() -> str:
    """Forms in which an engine may be named, for help texts and errors."""
    versions = {name: version for dialect in registry.dialects() for name, version in dialect.engine_versions.items()}
    others = "".join(f"{name}@VERSION for another than {version}, " for name, version in versions.items())
    others += "'cmd:PROGRAM ARGS' (docs/oplog.md), or FILE.py:CLASS or MODULE:CLASS (an Engine)"
    return f"{', '.join(built_in())}, {others}"


def engine_factory(name: str, timeout: float | None = None) -> EngineFactory:
    """The factory of the engine of that name.

    Args:
      name: of `built_in`; one of those that drive an installed engine, `@` and the version of it, whichever it is
        (`NAME@0.34.0`); `cmd:` and a command line, for an engine in a process of its own; or `FILE.py:NAME` or
        `MODULE:NAME`, for a class or function of the user's that takes a header.
      timeout: seconds that an engine in a process of its own may take for one answer; None for the default.

    Raises:
      ConfigError: there is no such engine.
      MissingExtraError: the engine needs a package that is not installed.
    """
    from hkv.oracle.engines import engine_process

    if name.startswith(engine_process.PREFIX):
        command = name.removeprefix(engine_process.PREFIX).strip()
        if not command:
            raise ConfigError("engine", name, "a command line after cmd:")
        return engine_process.process_factory(command, engine_process.TIMEOUT if timeout is None else timeout)
    base, at, release = name.partition("@")
    if base in built_in():
        return _built_in(base, release if at else None)
    module, separator, attribute = name.rpartition(":")
    if not separator or not module or not attribute:
        raise ConfigError("engine", name, f"one of {forms()}")
    return _attribute(name, _module(name, module), attribute)


def _built_in(name: str, release: str | None) -> EngineFactory:
    """Makes the engine of that name which the header's dialect has; `release` names a version of an installed one."""

    def make(header: Any) -> Any:
        dialect = registry.dialect_of(header.dialect)
        factory: Any = dialect.engine(name)
        if factory is None:
            raise ConfigError("engine", name, f"one of {header.dialect}'s: {', '.join(dialect.engines)}")
        if release is None:
            return factory(header)
        if "release" not in inspect.signature(factory).parameters:
            raise ConfigError("engine", f"{name}@{release}", f"{name}: only an installed engine has versions")
        return factory(header, release=release)

    return make


def _module(name: str, module: str) -> ModuleType:
    try:
        if module.endswith(".py"):
            return _load(pathlib.Path(module))
        return importlib.import_module(module)
    except HKVError:
        raise
    except Exception as error:
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

"""Functions of others, by name: in a Python module, in a file, or in a shared library with a C interface.

`MODULE:NAME` is imported, `FILE.py:NAME` is run as a module whose neighbours can be imported, and `LIBRARY.so:NAME` is
loaded, and found by its symbol; a name may have dots, as `CLASS.METHOD`. What the function takes and returns, its
caller knows. An error names the argument in which the name came.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import pathlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from hkv.errors import ConfigError, HKVError

LIBRARY = re.compile(r"\.(so|dylib|dll)(\.\d+)*$")
"""End of the path of a shared library."""

FORMS = "MODULE:FUNCTION, FILE.py:FUNCTION or LIBRARY.so:FUNCTION"
"""Forms of the name of a function, for help texts and errors."""


def split_name(argument: str, name: str, forms: str = FORMS) -> tuple[str, str]:
    """Module, file or library of a name, and what is in it.

    Raises:
      ConfigError: the name has not both.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ConfigError(argument, name, f"one of {forms}")
    return place, attribute


def is_library(place: str) -> bool:
    """True if a function is in a shared library."""
    return LIBRARY.search(place) is not None


def python_function(argument: str, name: str, purpose: str) -> Callable[..., Any]:
    """Function or class that `MODULE:NAME` or `FILE.py:NAME` names; errors tell its `purpose`.

    Raises:
      ConfigError: there is no such module, or nothing in it that can be called.
    """
    place, attribute = split_name(argument, name)
    module = found = _module(argument, name, place)
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ConfigError(argument, name, f"a class or function {attribute} in {module.__name__}, {purpose}")
    return found


def library_function(argument: str, name: str) -> Any:
    """The C function that `LIBRARY.so:NAME` names, as `ctypes` calls it; its types are the caller's to set.

    Raises:
      ConfigError: there is no such library or symbol.
    """
    place, symbol = split_name(argument, name)
    path = pathlib.Path(place)
    if not path.is_file():
        raise ConfigError(argument, name, f"a shared library; there is no file {place}")
    try:
        library = ctypes.CDLL(str(path.resolve()))
    except OSError as error:
        raise ConfigError(argument, name, f"a shared library that can be loaded ({error})") from None
    try:
        return getattr(library, symbol)
    except AttributeError:
        raise ConfigError(argument, name, f"a symbol {symbol} in {place}, not static") from None


@contextlib.contextmanager
def own_warnings() -> Iterator[None]:
    """Lets code of others warn: filters that make errors of warnings, as tests have, are for HKV's own modules."""
    if not any(action == "error" for action, *_ in warnings.filters):
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("default", module=r"(?!(hkv|reference|pallas_kernels)\b)")
        yield


def _module(argument: str, name: str, place: str) -> ModuleType:
    if "" not in sys.path:  # a program that is installed does not look where it is run
        sys.path.append("")
    try:
        with own_warnings():
            return _load(pathlib.Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except HKVError:
        raise
    except Exception as error:
        expected = f"a module that can be imported ({type(error).__name__}: {error})"
        raise ConfigError(argument, name, expected) from error


def _load(path: pathlib.Path) -> ModuleType:
    """The module that a file is; its neighbours can be imported, as when it is run."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    path = path.resolve()
    name = f"hkv_file:{path}"
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

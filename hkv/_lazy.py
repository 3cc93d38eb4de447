"""Names of a package that are loaded when they are first used: importing it loads neither JAX nor what is optional."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping


def loader(
    package: str, modules: Mapping[str, str], moved: Mapping[str, tuple[str, str]] | None = None
) -> Callable[[str], object]:
    """The package's `__getattr__`, of names by the module that has them; a module's own last name stands for itself.

    Args:
      package: the package's name.
      modules: by module, its names, with spaces between them.
      moved: deprecated names that still work: by old name the one that replaces it, which `modules` has, and the
        version since when.
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}
    old = {} if moved is None else moved

    def load(name: str) -> object:
        if name in old:
            new, version = old[name]
            warnings.warn(
                f"{package}.{name} is deprecated since {version}: use {package}.{new}", DeprecationWarning, stacklevel=2
            )
            name = new
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(homes[name])
        return module if homes[name].endswith(f".{name}") else getattr(module, name)

    return load

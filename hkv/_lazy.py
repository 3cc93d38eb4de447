"""Names of a package that are loaded when they are first used: importing it loads neither JAX nor what is optional."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def loader(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """The package's `__getattr__`, of names by the module that has them; a module's own last name stands for itself."""
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(homes[name])
        return module if homes[name].endswith(f".{name}") else getattr(module, name)

    return load

"""Scripts that are no modules, loaded to look inside."""

from __future__ import annotations

import importlib.util
import pathlib
from types import ModuleType


def load_script(path: pathlib.Path) -> ModuleType:
    """Module of a script; its `main` does not run."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

"""Rules of vLLM for each kind of layer, one kind a file, named as the kind is in logs."""

from __future__ import annotations

import importlib
import pkgutil

from hkv.spec import KINDS
from reference.dialects.vllm.kinds.kind import Kind


def all_kinds() -> dict[str, type[Kind]]:
    """Every kind's class, by the kind's name in logs."""
    found: dict[str, type[Kind]] = {}
    for name in sorted(KINDS.keys() & {module.name for module in pkgutil.iter_modules(__path__)}):
        module = importlib.import_module(f"{__name__}.{name}")
        (found[name],) = (
            value
            for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, Kind) and value.__module__ == module.__name__
        )
    return found

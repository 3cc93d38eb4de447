"""Rules of vLLM 0.33 for each kind of layer, compiled: one module per kind.

A module has `parameters(config, group, spec, eagle)`: the values of `GroupField` that the kind decides for the spec of
a group, besides those that follow from its flags. The compiled rules have one form for all kinds, over these numbers,
so that a new kind needs no program of its own. Modules are found by their names, which are the kinds' names in logs.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from hkv.errors import ConfigError
from hkv.spec import LayerSpec


def names() -> tuple[str, ...]:
    """The kinds that the dialect has rules for, in the order of their names; no module of theirs is imported."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")))


def all_kinds() -> dict[str, ModuleType]:
    """Every kind's module, by the kind's name in logs."""
    return {name: importlib.import_module(f"{__name__}.{name}") for name in names()}


def module(spec: LayerSpec) -> ModuleType:
    """The module of a spec's kind.

    Raises:
      ConfigError: the dialect has no rule for that kind.
    """
    found = all_kinds()
    if spec.kind not in found:
        raise ConfigError("kind", spec.kind, f"a kind of vllm-0.33: {', '.join(found)}")
    return found[spec.kind]

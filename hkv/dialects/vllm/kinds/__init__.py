"""What vLLM 0.33 does with each kind of layer, compiled: one module a kind.

A module has `NUMBER`, which its kind has in parameters; `LOOKED_UP_ONCE`; `parameters(config, group, eagle)`, the
values of `GroupField` that the kind decides; `skipped_tokens(n, reach)` and its inverse `last_query(end, reach)`; and
`search(query)`, if the kind is ever hit. Modules are found by their names, which are the kinds' names in logs.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from hkv.errors import ConfigError
from hkv.spec import LayerSpec


def all_kinds() -> dict[str, ModuleType]:
    """Every kind's module, by the kind's name in logs."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    return {name: importlib.import_module(f"{__name__}.{name}") for name in names}


def module(spec: LayerSpec) -> ModuleType:
    """The module of a spec's kind.

    Raises:
      ConfigError: the dialect has no rule for that kind.
    """
    found = all_kinds()
    if spec.kind not in found:
        raise ConfigError("kind", spec.kind, f"a kind of vllm-0.33: {', '.join(found)}")
    return found[spec.kind]


def number(spec: LayerSpec) -> int:
    """The number of a spec's kind in parameters."""
    found = module(spec)
    return found.number(spec) if hasattr(found, "number") else found.NUMBER

"""vLLM 0.33's side of each kind of layer, one module per kind: what compiled rules read of it, and what it is called.

A module has `parameters(config, group, spec, eagle)`: the values of `GroupField` that the kind decides for the spec of
a group, besides those that follow from its flags. The compiled rules have one form for all kinds, over these numbers,
so that a new kind needs no program of its own. Its class of `VllmLayer` has all else that only this dialect asks.
Modules are found by their names, which are the kinds' names in logs; they are host-only.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Sequence
from types import ModuleType

from hkv.dialects.vllm.kinds import _layer
from hkv.dialects.vllm.kinds._layer import VllmLayer
from hkv.errors import ConfigError
from hkv.spec import KINDS, LayerSpec


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


def layer(spec: LayerSpec) -> VllmLayer:
    """A layer under vLLM 0.33."""
    return layer_class(type(spec))(spec)


@functools.cache
def layer_class(of: type[LayerSpec]) -> type[VllmLayer]:
    """The class of layers for a class of specs."""
    all_kinds()
    return _layer.known(of)


def of_kind(kind: str) -> type[VllmLayer]:
    """The class of layers for a kind, by its name in logs.

    Raises:
      KeyError: no kind has that name.
    """
    return layer_class(KINDS[kind])


def layer_classes() -> dict[str, type[VllmLayer]]:
    """Every class of layers, by the name of its spec's class."""
    all_kinds()
    return _layer.classes()


def is_uniform_type(specs: Sequence[LayerSpec]) -> bool:
    """True if one block table serves all of `specs` (vLLM 0.33 `UniformTypeKVCacheSpecs.is_uniform_type`).

    They need one block size, the same split under context parallelism, and what the first layer's kind asks for. Page
    sizes may differ. The first layer decides: a plain window layer accepts latent ones of its window, not the reverse.

    Args:
      specs: at least one layer.
    """
    if len({spec.block_size for spec in specs}) > 1 or len({spec.shared_by_ranks for spec in specs}) > 1:
        return False
    return layer(specs[0]).is_uniform_with(specs)

"""The engines that commands can drive, by name; each module is imported only when its engine is asked for."""

from __future__ import annotations

import importlib

from hkv.errors import ConfigError
from hkv.oracle.engine import EngineFactory

ENGINES = {
    "numpy": "hkv.oracle.engines.numpy:NumpyEngine",
    "jax": "hkv.oracle.engines.jax:JaxEngine",
    "vllm": "hkv.oracle.engines.installed_vllm:InstalledVllmEngine",
}
"""Engine names and where their factories live, as `module:attribute`."""


def engine_factory(name: str) -> EngineFactory:
    """The factory of the engine of that name.

    Raises:
      ConfigError: there is no such engine.
      MissingExtraError: the engine needs a package that is not installed.
    """
    try:
        module, attribute = ENGINES[name].split(":")
    except KeyError:
        raise ConfigError("engine", name, f"one of {', '.join(ENGINES)}") from None
    return getattr(importlib.import_module(module), attribute)

"""Readers of families: each makes a model's layers from a `Decoder`; families.toml says which one reads a type."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping

from hkv.model.huggingface.family import Family, Reader, families_of


@functools.cache
def known_families() -> Mapping[str, Family]:
    """Every family by `model_type`."""
    return families_of(readers())


def readers() -> dict[str, Reader]:
    """The readers of all modules of this folder, by name."""
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    return {name: read for module in modules for name, read in module.READERS.items()}

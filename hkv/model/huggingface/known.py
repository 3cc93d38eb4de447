"""Names of fields that HKV knows: of each family, around a decoder, and of all files."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from hkv.model.huggingface import families, inert, wrappers
from hkv.model.huggingface.family import Family, words
from hkv.model.huggingface.fields import Fields
from hkv.model.huggingface.longest import LENGTHS

DRAFT = words(
    """draft_vocab_size target_hidden_size eagle_config eagle_aux_hidden_state_layer_ids norm_before_residual
    num_aux_hidden_states"""
)
"""Fields of draft modules on which their cache does not depend."""

DERIVED = {"head_dim": Fields.head_dim, "num_key_value_heads": Fields.kv_heads}
"""Fields that some families derive from others: a file may repeat them, with the same value."""

LEAST_TELLING = 2
"""Deciding fields of an encoder: to be near one says nothing."""


@functools.cache
def known_families() -> Mapping[str, Family]:
    """Every family by `model_type`."""
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(families.__path__):
        found |= importlib.import_module(f"{families.__name__}.{module.name}").FAMILIES
    return found


def own_fields(model_type: str) -> frozenset[str]:
    """Every field that a family declares, those of all families not counted."""
    return known_families()[model_type].known | words(inert.BY_FAMILY.get(model_type, ""))


def known_inside(fields: Fields) -> frozenset[str]:
    """Every field that a decoder's config may have, whatever its value."""
    known = own_fields(fields.model_type) | inert.INERT | frozenset(inert.ONLY) | frozenset(LENGTHS)
    whole = fields.values.get("model_type", fields.model_type)
    if fields.path or fields.model_type != whole:
        known |= wrappers.INERT  # a wrapper's marks may be repeated inside, and in a flat config all stand together
    return known if fields.path else known | words(wrappers.BY_TYPE.get(str(whole), ""))


def known_around(model_type: str) -> frozenset[str]:
    """Every field that may stand around a decoder's config, whatever its value."""
    own = words(wrappers.BY_TYPE.get(model_type, "")) | {wrappers.WRAPPERS[model_type].keys[0]}
    return inert.INERT | frozenset(inert.ONLY) | wrappers.INERT | own


def nearest_family(config: Mapping[str, Any], name: str | None = None) -> str:
    """The family that declares most of a config's fields, by its name and `model_type`.

    Args:
      config: the decoder's fields.
      name: a field that it must declare; None for any family.
    """
    known = known_families()
    cached = {key: family for key, family in known.items() if len(family.fields) > LEAST_TELLING}
    able = {key: family for key, family in cached.items() if name is None or name in own_fields(key)} or cached

    def distance(key: str) -> tuple[int, str]:
        unexplained = config.keys() - own_fields(key) - inert.INERT
        return len(unexplained) + len(able[key].fields.keys() - config.keys()), key

    best = min(able, key=distance)
    return f"{able[best].name} ({best})"

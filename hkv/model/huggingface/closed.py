"""Fields of a config that HKV does not know: those that may shape a cache are refused, the others are noted.

vLLM's classes have been built with every field that they could read and that HKV does not (`read_fields.json`, made by
`benchmarks/read_fields.py`). A field that is not in the table of a type that was built changes nothing there: vLLM
never reads it, or caches the same whatever it says. A type that was not built has no such table.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
from collections.abc import Iterator, Mapping
from typing import Any

from hkv.errors import ConfigError
from hkv.model.huggingface.common_fields import LENGTHS
from hkv.model.huggingface.families import known_families
from hkv.model.huggingface.family import AROUND, BY_TYPE, INERT, ONLY, WRAPPERS, type_of, words
from hkv.model.huggingface.fields import Fields, show
from hkv.model.huggingface.model import ReadOptions

QUANTIZATION = "quantization_config"
"""The one known field that may be ignored: how weights are packed, and the cache where that says so too."""

DRAFT = words(
    """draft_vocab_size target_hidden_size eagle_config eagle_aux_hidden_state_layer_ids norm_before_residual
    num_aux_hidden_states"""
)
"""Fields of draft modules on which their cache does not depend."""

DERIVED = {"head_dim": Fields.head_dim, "num_key_value_heads": Fields.kv_heads}
"""Fields that some families derive from others: a file may repeat them, with the same value."""

LEAST_TELLING = 2
"""Deciding fields of an encoder: to be near one says nothing."""


@dataclasses.dataclass(frozen=True)
class Unknown:
    """A field that HKV does not know, by its path and its last part, of the type of model that would own it."""

    place: str
    name: str
    value: Any
    owner: str


def check_closed(fields: Fields, options: ReadOptions) -> None:
    """Makes sure that no field that HKV does not know can shape a cache, and that inert ones have their value.

    All that are refused are named in one ConfigError; the others are noted.
    """
    _check_values(fields)
    unknown = [each for each in _unknown(fields) if not (options.draft and each.name in DRAFT)]
    ignored = [each for each in unknown if {each.place, each.name} & set(options.ignore_fields)]
    _check_ignored(fields, options, ignored)
    waiting = [each for each in unknown if each not in ignored]
    refused = [each for each in waiting if options.strict or options.draft or shapes(each.owner, each.name)]
    if refused:
        raise _refusal(fields, refused, options)
    if ignored:
        fields.notes["ignored fields"] = f"ignored, as asked: {_listed(ignored)}"
    if waiting:
        fields.notes["unknown fields"] = (
            f"no part of the cache, as vLLM 0.33 builds {fields.family.name}: {_listed(waiting)}"
        )


def shapes(model_type: str, name: str) -> bool:
    """True if a field that HKV does not read may shape what a type of model caches."""
    table = read_fields().get(model_type)
    return table is None or name in table


@functools.cache
def read_fields() -> Mapping[str, frozenset[str]]:
    """Fields that change what vLLM caches and that HKV does not read, or of which that is not certain, by the type."""
    text = importlib.resources.files("hkv.model.huggingface").joinpath("read_fields.json").read_text(encoding="utf-8")
    table = json.loads(text)
    return {name: frozenset(table["every type"]) | frozenset(own) for name, own in table["types"].items()}


def _listed(unknown: list[Unknown]) -> str:
    return ", ".join(f"{each.place} = {_short(each.value)}" for each in unknown)


def _short(value: object, most: int = 24) -> str:
    text = show(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _refusal(fields: Fields, refused: list[Unknown], options: ReadOptions) -> ConfigError:
    """One error that names all of them."""
    names, family = ", ".join(each.place for each in refused), fields.family.name
    value = refused[0].value if len(refused) == 1 else [each.value for each in refused]
    whose = "a field" if len(refused) == 1 else "fields"
    read = [each.name for each in refused if shapes(each.owner, each.name)]
    if not read:
        why = "a draft's fields are not traced" if options.draft else "all others are refused, as asked (strict)"
        return ConfigError(names, value, f"{whose} that HKV knows of {family}: {why}; --ignore-field plans without")
    known = {name for family in known_families().values() for name in family.known}
    nearest = next((name for name in read if name in known), None)
    hint = f" ({nearest_family(fields.values, nearest)} has {nearest})" if nearest else ""
    it = "it" if len(refused) == 1 else "them"
    reads = f"vLLM reads {it}" if all(each.owner in read_fields() for each in refused) else f"vLLM may read {it}"
    return ConfigError(names, value, f"{whose} that HKV knows of {family}: {reads}{hint}; --ignore-field plans without")


def _check_ignored(fields: Fields, options: ReadOptions, ignored: list[Unknown]) -> None:
    """Makes sure that nothing is ignored that decides."""
    for name in options.ignore_fields:
        if name == QUANTIZATION or any(name in (each.place, each.name) for each in ignored):
            continue
        last = name.rpartition(".")[2]
        if last in fields.family.fields or last in fields.family.spellings or last in {*ONLY, *DERIVED, *LENGTHS}:
            expected = f"a field that HKV does not know: on this one depends what {fields.family.name} caches"
            raise ConfigError("ignore_fields", name, expected)


def _unknown(fields: Fields) -> Iterator[Unknown]:
    """Fields of no known name, null ones apart: the decoder's, then those around it."""
    known = known_inside(fields) | DERIVED.keys()
    for name, value in fields.values.items():
        if value is not None and name not in known:
            yield Unknown(fields.path + name, name, value, fields.model_type)
    if fields.outer:
        around = type_of(fields.outer)
        for name, value in fields.outer.items():
            if value is not None and name not in known_around(around):
                yield Unknown(name, name, value, around)


def _check_values(fields: Fields) -> None:
    """Makes sure that fields which are inert at one value have that."""
    family = fields.family
    only = {**{name: value for name, value in ONLY.items() if name not in family.known}, **family.only}
    for name, value in fields.values.items():
        if value is None or name in family.fields or name in family.spellings:
            continue
        if name in only:
            wanted = only[name]
            if value != wanted and not (wanted is None and isinstance(value, bool)):
                expected = f"{wanted}: at another value {family.name} caches otherwise"
                raise ConfigError(fields.path + name, value, expected)
        elif name in DERIVED and name not in known_inside(fields):
            derived = DERIVED[name].fget(fields).value  # type: ignore[misc]
            if value != derived:
                raise ConfigError(fields.path + name, value, f"{derived}, which is what {family.name} derives")
    for name, wanted in ONLY.items():
        value = fields.outer.get(name)
        if value is not None and value != wanted and wanted is not None:
            expected = f"{wanted}: at another value {fields.outer['model_type']} caches otherwise"
            raise ConfigError(name, value, expected)


# Names of fields that HKV knows: inside a decoder's config and around one.


def known_inside(fields: Fields) -> frozenset[str]:
    """Every field that a decoder's config may have, whatever its value."""
    known = fields.family.known | INERT | frozenset(ONLY) | frozenset(LENGTHS)
    whole = fields.values.get("model_type", fields.model_type)
    if fields.path or fields.model_type != whole:
        known |= AROUND  # a wrapper's marks may be repeated inside, and in a flat config all stand together
    return known if fields.path else known | BY_TYPE.get(str(whole), frozenset())


def known_around(model_type: str) -> frozenset[str]:
    """Every field that may stand around a decoder's config, whatever its value."""
    own = BY_TYPE.get(model_type, frozenset()) | {WRAPPERS[model_type].keys[0]}
    return INERT | frozenset(ONLY) | AROUND | own


def nearest_family(config: Mapping[str, Any], name: str | None = None) -> str:
    """The family that declares most of a config's fields (and `name` too, if any does), by name and `model_type`."""
    cached = {key: family for key, family in known_families().items() if len(family.fields) > LEAST_TELLING}
    able = {key: family for key, family in cached.items() if name is None or name in family.known} or cached

    def distance(key: str) -> tuple[int, str]:
        unexplained = config.keys() - able[key].known - INERT
        return len(unexplained) + len(able[key].fields.keys() - config.keys()), key

    best = min(able, key=distance)
    return f"{able[best].name} ({best})"

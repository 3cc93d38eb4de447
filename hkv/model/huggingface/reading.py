"""A whole config: its family, its decoder's fields, and the refusal of what nobody knows."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from hkv.errors import ConfigError
from hkv.model.huggingface import families, inert, wrappers
from hkv.model.huggingface.decoder import Decoder
from hkv.model.huggingface.dropped import BORROWING, DROPPED
from hkv.model.huggingface.family import Family, words
from hkv.model.huggingface.fields import Fields, naming_file
from hkv.model.huggingface.layer_template import layer_template
from hkv.model.huggingface.longest import LENGTHS
from hkv.model.huggingface.model import Model
from hkv.model.huggingface.options import ReadOptions

DERIVED = {"head_dim": Fields.head_dim, "num_key_value_heads": Fields.kv_heads}
"""Fields that some families derive from others: a file may repeat them, with the same value."""

DRAFT = words(
    """draft_vocab_size target_hidden_size eagle_config eagle_aux_hidden_state_layer_ids norm_before_residual
    num_aux_hidden_states"""
)
"""Fields of draft modules on which their cache does not depend."""


@naming_file
def read_model(config: Mapping[str, Any], options: ReadOptions | None = None) -> Model:
    """Reads from a model's config what each of its layers caches.

    Args:
      config: the `config.json`, or the `text_config` in it.
      options: settings with which the model is served.

    Raises:
      ConfigError: an unknown `model_type`, a field that its family does not know, or an impossible value.
      SpecError: an impossible size.
    """
    options = options or ReadOptions()
    fields = decoder_fields(config)
    check_closed(fields, DRAFT if options.draft else frozenset())
    _check_ranks(fields, options.tensor_parallel)
    return fields.family.read(Decoder(fields, options))


def _check_ranks(fields: Fields, ranks: int) -> None:
    """Makes sure that ranks, and key/value heads, share the query heads alike (vLLM 0.33 `Attention`, `ModelConfig`).

    Raises:
      ConfigError: they do not.
    """
    name = "num_attention_heads"
    heads = fields.integer(name).value if name in fields.family.fields else fields.values.get(name)
    if type(heads) is int and heads % ranks:
        raise ConfigError(fields.place(name), heads, f"a multiple of {ranks} tensor-parallel ranks")
    if {name, "num_key_value_heads"} <= fields.family.fields.keys() and type(heads) is int:
        shared = fields.kv_heads
        if heads % shared.value:
            raise ConfigError(fields.place(name), heads, f"a multiple of the {shared.value} key/value heads")


@functools.cache
def known_families() -> Mapping[str, Family]:
    """Every family by `model_type`."""
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(families.__path__):
        found |= importlib.import_module(f"{families.__name__}.{module.name}").FAMILIES
    return found


LAYER_LIST = "layer_list"
"""The `model_type` of layers that are listed by hand."""


@naming_file
def decoder_fields(config: Mapping[str, Any]) -> Fields:
    """The decoder's fields of a whole config, with the family they belong to.

    Raises:
      ConfigError: the config is not an object, or is of no known type.
    """
    if not isinstance(config, Mapping):
        raise ConfigError("config", config, "a JSON object")
    model_type = _type_of(config)
    wrapper = wrappers.WRAPPERS.get(model_type)
    if wrapper is None:
        return Fields(config, model_type, _family(model_type, config))
    if wrapper.flat and wrapper.keys[0] not in config:
        return Fields(config, wrapper.decoder, _family(wrapper.decoder, config))
    inner, path, outer = config, "", dict(config)
    for key in wrapper.keys:
        if key in inner or path == "":
            path, inner = f"{path}{key}.", inner.get(key)
            inner = {} if inner is None and wrapper.decoder else inner
            if not isinstance(inner, Mapping):
                raise ConfigError(path.removesuffix("."), inner, "an object, the decoder's config")
    _check_outer(config, wrapper.keys[0], model_type)
    decoder = _type_of(inner) if inner.get("model_type") or not wrapper.decoder else wrapper.decoder
    decoder = wrapper.decoder if decoder == model_type else decoder
    return Fields(inner, decoder, _family(decoder, inner, f"{path}model_type"), outer, path)


def _type_of(config: Mapping[str, Any]) -> str:
    """The `model_type`, or the one that a list of layers, or an architecture, has without it."""
    model_type = config.get("model_type")
    if model_type is None and isinstance(config.get("layers"), list):
        return LAYER_LIST
    if model_type is None:
        for architecture in config.get("architectures") or ():
            if architecture in ARCHITECTURES:
                return ARCHITECTURES[architecture]
    if not isinstance(model_type, str):
        raise ConfigError("model_type", model_type, "the name of a type of model")
    return model_type


ARCHITECTURES = {"LongcatFlashForCausalLM": "longcat_flash", "Mistral3ForConditionalGeneration": "mistral3"}
"""Types of models by architecture, for files without a `model_type` (vLLM 0.33 `_ARCHITECTURE_TO_MODEL_TYPE`)."""


def check_layer_list(path: str, config: Mapping[str, Any]) -> None:
    """Makes sure that a file lists layers by hand, whose `model_type` may be left out.

    Args:
      path: the file.
      config: its content.

    Raises:
      ConfigError: it does not.
    """
    if config.get("model_type", LAYER_LIST) != LAYER_LIST:
        raise ConfigError(f"{path}: model_type", config["model_type"], f"{LAYER_LIST}, or none, in a list of layers")
    if not isinstance(config.get("layers"), list):
        raise ConfigError(f"{path}: layers", config.get("layers"), f"a list, such as {layer_template(config)}")


def _family(model_type: str, config: Mapping[str, Any], place: str = "model_type") -> Family:
    family = known_families().get(model_type)
    if family is not None:
        return family
    if model_type in DROPPED:
        raise ConfigError(
            place, model_type, f"a model that vLLM 0.33 serves: vLLM served it until {DROPPED[model_type]}"
        )
    if model_type in BORROWING:
        raise ConfigError(place, model_type, "a model with caches of its own: this draft module reads its target's")
    expected = f"a known type, of which {nearest_family(config)} is nearest by its fields"
    raise ConfigError(place, model_type, f"{expected}; or its layers by hand (--layers FILE): {layer_template(config)}")


LEAST_TELLING = 2
"""Deciding fields of an encoder: to be near one says nothing."""


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


def own_fields(model_type: str) -> frozenset[str]:
    """Every field that a family declares, those of all families not counted."""
    return known_families()[model_type].known | words(inert.BY_FAMILY.get(model_type, ""))


def check_closed(fields: Fields, more: frozenset[str] = frozenset()) -> None:
    """Makes sure that the decoder has no field that its family does not know, null ones apart.

    Args:
      fields: the decoder's.
      more: further fields on which nothing depends.

    Raises:
      ConfigError: it has one, or one that is inert only at another value.
    """
    family = fields.family
    own = own_fields(fields.model_type)
    known = own | inert.INERT | frozenset(LENGTHS) | more
    whole = fields.values.get("model_type", fields.model_type)
    if fields.path or fields.model_type != whole:
        known |= wrappers.INERT  # a wrapper's marks may be repeated inside, and in a flat config all stand together
    if not fields.path:
        known |= words(wrappers.BY_TYPE.get(str(whole), ""))
    only = {**{name: value for name, value in inert.ONLY.items() if name not in own}, **family.only}
    for name, value in fields.values.items():
        if value is None or name in family.fields or name in family.spellings:
            continue
        if name in only:
            wanted = only[name]
            if value != wanted and not (wanted is None and isinstance(value, bool)):
                raise ConfigError(
                    fields.path + name, value, f"{wanted}: at another value {family.name} caches otherwise"
                )
        elif name in DERIVED and name not in known:
            derived = DERIVED[name].fget(fields).value  # type: ignore[misc]
            if value != derived:
                raise ConfigError(fields.path + name, value, f"{derived}, which is what {family.name} derives")
        elif name not in known:
            raise ConfigError(fields.path + name, value, _unknown(fields, name))


def _unknown(fields: Fields, name: str) -> str:
    family = fields.family
    owners = [key for key in known_families() if name in own_fields(key)]
    if not owners:
        return f"a field that {family.name} or another family has; if no byte depends on it, remove it from the file"
    return f"a field of {family.name}, which has none of that name; {nearest_family(fields.values, name)} has"


def _check_outer(config: Mapping[str, Any], key: str, model_type: str) -> None:
    """Makes sure that nothing unknown stands around a decoder, null apart."""
    known = inert.INERT | wrappers.INERT | words(wrappers.BY_TYPE.get(model_type, "")) | {key}
    for name, value in config.items():
        if value is None or name in known:
            continue
        if name in inert.ONLY:
            if value != inert.ONLY[name] and inert.ONLY[name] is not None:
                raise ConfigError(name, value, f"{inert.ONLY[name]}: at another value {model_type} caches otherwise")
        else:
            expected = f"a field of {model_type} around its {key}; if no byte depends on it, remove it from the file"
            raise ConfigError(name, value, expected)

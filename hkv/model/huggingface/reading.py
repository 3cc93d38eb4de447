"""A whole config: its family, its decoder's fields, and the refusal of what nobody knows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hkv.errors import ConfigError
from hkv.model.huggingface.closed import QUANTIZATION, check_closed, nearest_family
from hkv.model.huggingface.common_fields import check_quantization
from hkv.model.huggingface.decoder import Decoder
from hkv.model.huggingface.families import known_families
from hkv.model.huggingface.family import LAYER_LIST, WRAPPERS, Family, layer_template, type_of, words
from hkv.model.huggingface.fields import Fields
from hkv.model.huggingface.loading import ConfigFile, naming_file
from hkv.model.huggingface.model import Model, ReadOptions

SINCE = {
    "0.9.2": "phi3small",
    "0.10.2": "motif phi4flash",
    "0.22.0": "jais",
    "0.23.0": "xverse bamba minimax minimax_text_01 minimax_m1 baichuan qwen internlm",
    "0.24.0": "aquila grok-1",
    "0.25.0": "telechat",
    "0.26.0": "plamo2 ouro",
    "0.28.0": "arctic chameleon mpt",
}
"""Last version that served the types (vLLM 0.33 `_PREVIOUSLY_SUPPORTED_MODELS`)."""

DROPPED = {name: version for version, names in SINCE.items() for name in names.split()}

BORROWING = words("gemma4_assistant gemma4_unified_assistant")
"""Draft modules that cache nothing: every layer reads the caches of the model that they draft for."""


@naming_file
def read_model(config: Mapping[str, Any], options: ReadOptions | None = None) -> Model:
    """Reads from a model's config what each of its layers caches."""
    options = options or ReadOptions()
    fields = decoder_fields(config)
    if QUANTIZATION in options.ignore_fields:
        less = [{k: v for k, v in each.items() if k != QUANTIZATION} for each in (fields.values, fields.outer)]
        fields = dataclasses.replace(fields, values=less[0], outer=less[1])
        fields.notes[QUANTIZATION] = f"ignored, as asked: {QUANTIZATION}"
    if isinstance(config, ConfigFile) and config.note:
        fields.notes["config"] = config.note
    check_closed(fields, options)
    check_quantization(fields)
    _check_ranks(fields, options.tensor_parallel)
    return fields.family.read(Decoder(fields, options))


def _check_ranks(fields: Fields, ranks: int) -> None:
    """Makes sure that ranks and key/value heads share the query heads alike (vLLM 0.33 `Attention`, `ModelConfig`)."""
    name = "num_attention_heads"
    heads = fields.integer(name).value if name in fields.family.fields else fields.values.get(name)
    if type(heads) is int and heads % ranks:
        raise ConfigError(fields.place(name), heads, f"a multiple of {ranks} tensor-parallel ranks")
    if {name, "num_key_value_heads"} <= fields.family.fields.keys() and type(heads) is int:
        shared = fields.kv_heads
        if heads % shared.value:
            raise ConfigError(fields.place(name), heads, f"a multiple of the {shared.value} key/value heads")


@naming_file
def decoder_fields(config: Mapping[str, Any]) -> Fields:
    """The decoder's fields of a whole config, with the family they belong to."""
    if not isinstance(config, Mapping):
        raise ConfigError("config", config, "a JSON object")
    model_type = type_of(config)
    wrapper = WRAPPERS.get(model_type)
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
    decoder = type_of(inner) if inner.get("model_type") or not wrapper.decoder else wrapper.decoder
    decoder = wrapper.decoder if decoder == model_type else decoder
    return Fields(inner, decoder, _family(decoder, inner, f"{path}model_type"), outer, path)


def check_layer_list(path: str, config: Mapping[str, Any]) -> None:
    """Makes sure that a file lists layers by hand, whose `model_type` may be left out."""
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
    if "auto_map" in config:
        code = next(iter((config["auto_map"] or {}).values()), "") if isinstance(config["auto_map"], Mapping) else ""
        expected = (
            f"a type that HKV knows: this one is remote code (auto_map{f', {code}' if code else ''}), which is not run"
        )
        raise ConfigError(
            place, model_type, f"{expected}; list its layers by hand (--layers FILE): {layer_template(config)}"
        )
    expected = f"a known type, of which {nearest_family(config)} is nearest by its fields"
    raise ConfigError(place, model_type, f"{expected}; or its layers by hand (--layers FILE): {layer_template(config)}")

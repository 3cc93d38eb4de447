"""A whole config: its family, its decoder's fields, and the refusal of unknown ones.

vLLM's classes have been built with every field that they could read and that HKV does not (`read_fields.json`, made by
`benchmarks/read_fields.py`). A field that is not in the table of a type that was built changes nothing there: vLLM
never reads it, or caches the same whatever it says. A type that was not built has no such table.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hkv.errors import ConfigError
from hkv.model.huggingface.common_fields import LENGTHS, check_quantization
from hkv.model.huggingface.decoder import Decoder
from hkv.model.huggingface.families import known_families
from hkv.model.huggingface.family import (
    AROUND,
    BY_TYPE,
    INERT,
    LAYER_LIST,
    ONLY,
    WRAPPERS,
    Family,
    layer_template,
    type_of,
    words,
)
from hkv.model.huggingface.fields import Fields, show
from hkv.model.huggingface.loading import ConfigFile, load_config, naming_file
from hkv.model.huggingface.model import GDN_PREFILLS, Model, ReadOptions

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

UNREAD = {
    **dict.fromkeys(
        ("glm5_next", "glm5_next_text"), "the ring of keys that are not pooled yet (vLLM 0.33 `Glm5NextTailCache`)"
    ),
    **dict.fromkeys(("step5", "step5_vl"), "the ring of an open region's rows (vLLM 0.33 `Step5CSATailRing`)"),
}
"""Types that vLLM 0.33 serves, each with its cache, a `CircularBufferSpec`, that no reader makes."""

BORROWING = words("gemma4_assistant gemma4_unified_assistant")
"""Draft modules that cache nothing: every layer reads the caches of the model that they draft for."""


def read_model(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    block_size: int | None = None,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    dtype: str | None = None,
    kv_dtype: str = "auto",
    state_dtype: str | None = None,
    speculative_tokens: int = 0,
    gdn_prefill: str = GDN_PREFILLS[0],
    draft: bool = False,
    ignore_fields: Sequence[str] = (),
    strict: bool = False,
) -> Model:
    """Reads from a model's config what each of its layers caches on one tensor-parallel rank.

    Args:
      config: the model's `config.json`, the folder it is in, a released model's name (`gpt-oss-20b`), or its content.
      block_size: tokens per block; None for what the model's kernels want.
      tensor_parallel: ranks that split the heads.
      context_parallel: ranks that split the tokens of full-attention layers.
      dtype: the model's element type; None for its config's.
      kv_dtype: element type or packing of the cache; `auto` stores what the model computes with.
      state_dtype: element type of recurrent states; None for the model's.
      speculative_tokens: draft tokens verified in one step.
      gdn_prefill: kernel for prompts of gated delta nets, one of `GDN_PREFILLS`; `triton` keeps no state inside chunks.
      draft: whether the layers belong to a draft module.
      ignore_fields: names of fields that HKV does not know, to be read over whatever they say.
      strict: refuse every field that HKV does not know, also those on which no byte depends.

    Raises:
      FileError: the file cannot be read.
      ConfigError: an unknown architecture, or an impossible value.
      SpecError: an impossible size.
    """
    fields = config if isinstance(config, Mapping) else load_config(os.fspath(config))
    options = ReadOptions(
        block_size=block_size,
        tensor_parallel=tensor_parallel,
        context_parallel=context_parallel,
        dtype=dtype,
        kv_dtype=kv_dtype,
        state_dtype=state_dtype,
        speculative_tokens=speculative_tokens,
        gdn_prefill=gdn_prefill,
        draft=draft,
        ignore_fields=tuple(ignore_fields),
        strict=strict,
    )
    return read_config(fields, options)


@naming_file
def read_config(config: Mapping[str, Any], options: ReadOptions | None = None) -> Model:
    """Reads from the content of a model's config what each of its layers caches."""
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
            outside = _family(wrapper.decoder, config).fields.keys() & config.keys() if wrapper.decoder else ()
            inner = {} if inner is None and wrapper.decoder and not outside else inner
            if inner is None and outside:
                expected = f"an object, the decoder's config: {', '.join(sorted(outside))} of it stand outside"
                raise ConfigError(path.removesuffix("."), None, expected)
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
    if model_type in UNREAD:
        raise ConfigError(place, model_type, f"another family: of this one HKV does not know {UNREAD[model_type]}")
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


# Fields of a config that HKV does not know: those that may shape a cache are refused, the others are noted.


QUANTIZATION = "quantization_config"
"""The one known field that may be ignored: how weights are packed, and the cache where that says so too."""

DRAFT = words(
    """block_size confidence_head_alpha confidence_head_with_markov dflash_config draft_vocab_size dspark_config
    eagle_aux_hidden_state_layer_ids eagle_config enable_confidence_head fc_norm has_own_lm_head is_causal logit_scale
    markov_head_type markov_rank mask_token_id norm_before_fc norm_before_residual norm_output num_aux_hidden_states
    num_aux_layers num_target_layers target_hidden_size target_layer_ids use_aux_hidden_state"""
)
"""Fields that draft classes of vLLM 0.33 read beside the decoder's, on which their cache does not depend."""

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
    everywhere = {name for family in known_families().values() for name in family.known} if options.draft else set()
    refused = [
        each
        for each in waiting
        if options.strict or (options.draft and each.name not in everywhere) or shapes(each.owner, each.name)
    ]
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
        if decides(fields, name):
            expected = f"a field that HKV does not know: on this one depends what {fields.family.name} caches"
            raise ConfigError("ignore_fields", name, expected)


def decides(fields: Fields, name: str) -> bool:
    """True if a field of that name or path is one that HKV knows and on which the cache may depend."""
    last = name.rpartition(".")[2]
    return last in fields.family.fields or last in fields.family.spellings or last in {*ONLY, *DERIVED, *LENGTHS}


def ignored_in(config: Mapping[str, Any], names: Sequence[str], other: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Names of fields to be read over in a model's config, of those for it and for a draft's, or the other way round.

    A field by which the one decides is read over in the other alone, where that has it and does not know it.
    """
    if other is None:
        return tuple(names)
    own, another = decoder_fields(config), decoder_fields(other)
    lasts = {name: name.rpartition(".")[2] for name in names}
    return tuple(n for n in names if not decides(own, n) or decides(another, n) or lasts[n] not in another.values)


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

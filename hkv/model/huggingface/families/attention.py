"""Keys and values: full attention, windows and chunks, by the rules of the families that have them.

A rule gives each layer its kind and the fields that say so: the file's list, else a period, a threshold or a pattern.
`attention` makes a reader of it; what else differs between a family's layers, heads, sizes or windows, is a `Geometry`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hkv.errors import ConfigError
from hkv.limits import MAX_TOKENS, check_whole
from hkv.model.huggingface.decoder import Decoder
from hkv.model.huggingface.fields import Field, Fields
from hkv.model.huggingface.model import Model

Kinds = list[tuple[str, tuple[str, ...]]]
"""Of each layer its kind and the fields that say so."""

Rule = Callable[[Fields], Kinds]

Geometry = Callable[[Fields, str, int], Mapping[str, Any]]
"""Arguments of `Decoder.attention` for a layer, from its kind and its index."""

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"

KNOWN = {FULL: FULL, "attention": FULL, SLIDING: SLIDING, "sliding_window_attention": SLIDING}
"""Names of layer types in configs, and what each is."""


def attention(rule: Rule, geometry: Geometry | None = None) -> Callable[[Decoder], Model]:
    """A reader of layers of the kinds that a rule gives; the last ones may read the caches of earlier ones."""

    def read(decoder: Decoder) -> Model:
        fields = decoder.fields
        layers = rule(fields)
        kinds = [kind for kind, _ in layers]
        for index, (kind, names) in enumerate(layers):
            shares = shared_layer(fields, kinds, index)
            names = names if shares is None else (*names, fields.place("num_kv_shared_layers"))
            own = dict(geometry(fields, kind, index)) if geometry else {}
            if kind == SLIDING and "window" not in own:
                own["window"] = window_of(fields)
            decoder.attention(index, kind, names, shares=shares, **own)
        return decoder.model(len(layers))

    return read


def shared_layer(fields: Fields, kinds: list[str], index: int) -> int | None:
    """The layer whose cache a layer reads instead of its own: the last own one of its kind (Gemma 3n, Gemma 4)."""
    if "num_kv_shared_layers" not in fields.family.fields:
        return None
    count = fields.count("num_kv_shared_layers")
    first = len(kinds) - count
    if not count or index < first or first <= 0:
        return None
    for candidate in range(first - 1, -1, -1):
        if kinds[candidate] == kinds[index]:
            return candidate
    expected = f"a {kinds[index]} layer before layer {first}, for layer {index} to share"
    raise ConfigError(fields.place("num_kv_shared_layers"), count, expected)


def window_of(fields: Fields) -> Field | None:
    """The window, or None for none: null, 0 as some files have it, or without `use_sliding_window`."""
    unused = "use_sliding_window" in fields.family.fields and not fields.flag("use_sliding_window")
    return None if fields.raw("sliding_window") == 0 or unused else fields.optional("sliding_window")


def listed(fields: Fields, known: Mapping[str, str] = KNOWN) -> Kinds | None:
    """By `layer_types`, where the file has it."""
    found = fields.names("layer_types", known)
    return None if found is None else [(kind, (place,)) for kind, place in found]


# Rules: of one kind throughout, by the file's list, by a period or a pattern.


def _same(fields: Fields, kind: str) -> Kinds:
    names = ["sliding_window", *(["use_sliding_window"] if "use_sliding_window" in fields.family.fields else [])]
    return [(kind, tuple(fields.place(name) for name in names))] * fields.num_layers


def everywhere(fields: Fields) -> Kinds:
    """One window for all layers where the file has one (vLLM 0.33 `CacheConfig.sliding_window`)."""
    return _same(fields, SLIDING if window_of(fields) else FULL)


def stated(fields: Fields) -> Kinds:
    """By `layer_types` where the file has it, else as `everywhere`."""
    kinds = listed(fields)
    return everywhere(fields) if kinds is None else kinds


def patterned(windowed: Callable[[int, int], bool]) -> Rule:
    """By `layer_types`, else by the config class's own rule, from a layer's index and the number of layers."""

    def kinds(fields: Fields) -> Kinds:
        if (found := listed(fields)) is not None:
            return found
        count, place = fields.num_layers, (fields.place("layer_types"),)
        return [(SLIDING if windowed(index, count) else FULL, place) for index in range(count)]

    return kinds


def every(period: int) -> Rule:
    """Every so manieth layer is full attention."""
    return patterned(lambda index, _: (index + 1) % period != 0)


def periodic(name: str) -> Rule:
    """By `layer_types`, else every so manieth layer is full attention, as a field of that name says."""

    def kinds(fields: Fields) -> Kinds:
        if (found := listed(fields)) is not None:
            return found
        period = fields.integer(name)
        return [(SLIDING if (i + 1) % period.value else FULL, period.names) for i in range(fields.num_layers)]

    return kinds


# Rules of single families.


def _later_layers(fields: Fields) -> Kinds:
    """Qwen2's: with `use_sliding_window`, layers from `max_window_layers` on have a window.

    vLLM 0.33 does not serve a model of which some layers have a window and some none.
    """
    kinds, window = listed(fields), window_of(fields)
    if kinds is not None:
        kinds = [(kind if window else FULL, names) for kind, names in kinds]
    elif window is None:
        kinds = _same(fields, FULL)
    else:
        first, names = fields.count("max_window_layers"), ("max_window_layers", "use_sliding_window")
        places = tuple(map(fields.place, names))
        kinds = [(SLIDING if index >= first else FULL, places) for index in range(fields.num_layers)]
    if len({kind for kind, _ in kinds}) < 2:
        return kinds
    if fields.count("max_window_layers") == fields.num_layers:
        return _same(fields, FULL)
    place = fields.place("layer_types" if fields.given("layer_types") else "max_window_layers")
    raise ConfigError(place, fields.values.get("max_window_layers"), "a window in all layers or in none, for vLLM 0.33")


def _all_or_none(fields: Fields) -> Kinds:
    """A window if all layers have one, else none: the model's own code does not look at single layers (Qwen2-MoE)."""
    kinds = listed(fields)
    if kinds is not None and all(kind == SLIDING for kind, _ in kinds):
        return everywhere(fields)
    return _same(fields, FULL)


def _exaone(fields: Fields) -> Kinds:
    """Without a window, all full attention; else as the period says."""
    if window_of(fields) is None:
        return [(FULL, (fields.place("sliding_window"),))] * fields.num_layers
    return periodic("sliding_window_pattern")(fields)


def _dots1(fields: Fields) -> Kinds:
    """By `layer_types`, else a window in layers from `max_window_layers` on."""
    first = fields.count("max_window_layers")
    place = () if fields.given("layer_types") else (fields.place("max_window_layers"),)
    return [(kind, (*names, *place)) for kind, names in patterned(lambda index, _: index >= first)(fields)]


def _cohere2_moe(fields: Fields) -> Kinds:
    """The first layers, dense ones, have a pattern of their own."""
    if (kinds := listed(fields)) is not None:
        return kinds
    dense, first = fields.count("first_k_dense_replace"), fields.integer("prefix_dense_sliding_window_pattern")
    period = fields.integer("sliding_window_pattern")
    names = (*first.names, *period.names, fields.place("first_k_dense_replace"))
    count = fields.num_layers
    prefix = [(SLIDING if (i + 1) % first.value else FULL, names) for i in range(min(dense, count))]
    return prefix + [(SLIDING if (i + 1) % period.value else FULL, names) for i in range(count - len(prefix))]


def _gpt_oss(fields: Fields) -> Kinds:
    """Every second layer has a window; a file that lists others is refused (vLLM 0.33 `OAIAttention`)."""
    kinds = every(2)(fields)
    for index, (kind, names) in enumerate(kinds):
        if kind != (FULL if index % 2 else SLIDING):
            raise ConfigError(names[0], kind, "windows in layers 0, 2, 4 ..., which is how vLLM 0.33 serves gpt-oss")
    return kinds


def _smollm3(fields: Fields) -> Kinds:
    """With `use_sliding_window`, layers without rotary positions have the window."""
    if (kinds := listed(fields)) is not None:
        return kinds
    if window_of(fields) is None:
        return _same(fields, FULL)
    rotary = fields.flags("no_rope_layers")
    if rotary is not None:
        return [(FULL if flag else SLIDING, (place,)) for flag, place in rotary]
    interval = fields.integer("no_rope_layer_interval")
    return [(FULL if (i + 1) % interval.value else SLIDING, interval.names) for i in range(fields.num_layers)]


def _modernbert(fields: Fields) -> Kinds:
    """A window in two of three layers."""
    period, _ = fields.integer("global_attn_every_n_layers"), fields.integer("local_attention")
    kinds: Kinds = [(SLIDING if i % period.value else FULL, period.names) for i in range(fields.num_layers)]
    return listed(fields) or kinds


def _step3p5(fields: Fields) -> Kinds:
    """By `layer_types`, which may list the MTP layers too; without it all layers are full attention."""
    count, extra = fields.num_layers, fields.count("num_nextn_predict_layers")
    found = fields.names("layer_types", KNOWN, (count, count + extra))
    if found is None:
        return [(FULL, (fields.place("layer_types"),))] * count
    return [(kind, (place,)) for kind, place in found[:count]]


def _mimo_v2(fields: Fields) -> Kinds:
    """By `hybrid_layer_pattern`, else `layer_types`, else full attention in the first layer and every sixth."""
    pattern = fields.flags("hybrid_layer_pattern")
    if pattern is not None:
        return [(SLIDING if flag else FULL, (place,)) for flag, place in pattern]
    place = (fields.place("hybrid_layer_pattern"),)
    default = [(FULL if i == 0 or not (i + 1) % 6 else SLIDING, place) for i in range(fields.num_layers)]
    return listed(fields) or default


def _gemma4(fields: Fields) -> Kinds:
    """Every sixth layer is full attention, and the last one in any case (transformers `Gemma4TextConfig`)."""
    name = "use_bidirectional_attention"
    if fields.raw(name) not in (None, "vision"):
        expected = "null or vision: with all, the model keeps no cache"
        raise ConfigError(fields.place(name), fields.raw(name), expected)
    kinds = every(6)(fields)
    return [*kinds[:-1], (FULL, kinds[-1][1])]


def _llama4(fields: Fields) -> Kinds:
    """Chunks by `no_rope_layers`, else in all but every so manieth layer (vLLM 0.33 `Llama4Attention`).

    vLLM does not read `layer_types`: a file in which it says otherwise is refused.
    """
    chunk = fields.optional("attention_chunk_size")
    rotary = fields.flags("no_rope_layers") if fields.raw("no_rope_layers") != [] else None
    if rotary is not None:
        kinds: Kinds = [(CHUNKED if flag else FULL, (place,)) for flag, place in rotary]
    else:
        interval = fields.integer("no_rope_layer_interval")
        kinds = [(CHUNKED if (i + 1) % interval.value else FULL, interval.names) for i in range(fields.num_layers)]
    found = fields.names("layer_types", {FULL: FULL, CHUNKED: CHUNKED})
    for (kind, place), (own, _) in zip(found or [], kinds, strict=False):
        if kind != own:
            raise ConfigError(place, kind, f"{own}, as no_rope_layers says to vLLM 0.33")
    places = [()] * len(kinds) if found is None else [(place,) for _, place in found]
    size = fields.place("attention_chunk_size")
    own_kinds = zip(kinds, places, strict=True)
    return [(kind if chunk else FULL, (*names, *place, size)) for (kind, names), place in own_kinds]


# Geometries of single families.


def _longer(fields: Fields, kind: str, index: int) -> Mapping[str, Any]:
    """Windows are a token longer than the file says: the query's own (vLLM 0.33 `CohereAttention`)."""
    window = window_of(fields) if kind == SLIDING else None
    return {"window": Field(window.value + 1, window.names) if window else None}


def _half(fields: Fields, kind: str, index: int) -> Mapping[str, Any]:
    local = fields.integer("local_attention")
    return {"window": Field(local.value // 2, local.names)} if kind == SLIDING else {}


def _chunk(fields: Fields, kind: str, index: int) -> Mapping[str, Any]:
    return {"window": fields.optional("attention_chunk_size")} if kind == CHUNKED else {}


def _mimo_v2_sizes(fields: Fields, kind: str, index: int) -> Mapping[str, Any]:
    """Window layers may have key/value heads and sizes of their own; values are narrower than keys."""
    value = fields.integer("v_head_dim")
    if kind != SLIDING:
        heads = fields.derived("num_key_value_heads", fields.kv_heads)
        return {"heads": heads, "head_dim": fields.head_dim, "value_dim": value}

    heads, size = fields.optional("swa_num_key_value_heads"), fields.head_dim
    return {
        "heads": heads or fields.derived("swa_num_key_value_heads", fields.kv_heads.times(2)),
        "head_dim": fields.optional("swa_head_dim") or fields.derived("swa_head_dim", size),
        "value_dim": fields.optional("swa_v_head_dim") or fields.derived("swa_v_head_dim", value),
        "window": fields.optional("sliding_window_size") or fields.integer("sliding_window"),
    }


def _gemma4_sizes(fields: Fields, kind: str, index: int) -> Mapping[str, Any]:
    """Full-attention layers have heads of another size, and sometimes another number of them."""
    heads, size = (_gemma4_own(fields, kind, index, name) for name in ("num_key_value_heads", "head_dim"))
    return {"heads": heads, "head_dim": size}


def _gemma4_own(fields: Fields, kind: str, index: int, name: str) -> Field:
    """A layer's own value of a field, else that of all full-attention layers, else the common one."""
    if fields.raw("per_layer_config") is not None:
        for key, values in fields.nested("per_layer_config").items():
            if str(key).isdigit() and int(key) == index and isinstance(values, Mapping) and name in values:
                place = f"{fields.place('per_layer_config')}.{key}.{name}"
                check_whole(place, values[name], 1, MAX_TOKENS)
                return Field(values[name], (place,))
        return fields.integer(name)
    if kind != FULL:
        return fields.integer(name)
    if name == "head_dim":
        return fields.integer("global_head_dim")
    own = fields.optional("num_global_key_value_heads") if fields.flag("attention_k_eq_v") else None
    common = fields.integer(name)
    names = (fields.place("num_global_key_value_heads"), fields.place("attention_k_eq_v"))
    if own is not None:
        return Field(own.value, names)
    if fields.flag("attention_k_eq_v"):
        fields.derived("num_global_key_value_heads", common)
    return Field(common.value, (*common.names, *names))


READERS: Mapping[str, Callable[[Decoder], Model]] = {
    "stated": attention(stated),
    "everywhere": attention(everywhere),
    "full unless stated": attention(patterned(lambda index, count: False)),
    "windows unless stated": attention(patterned(lambda index, count: True)),
    "every second": attention(every(2)),
    "every fourth": attention(every(4)),
    "every fifth": attention(every(5)),
    "first of four": attention(patterned(lambda index, _: index % 4 != 0)),
    "fourth from the end": attention(patterned(lambda index, count: (count - 1 - index) % 4 != 0)),
    "sixth and last": attention(patterned(lambda index, count: (index + 1) % 6 != 0 and index < count - 1)),
    "sliding_window_pattern": attention(periodic("sliding_window_pattern")),
    "global_attn_every_n_layers": attention(periodic("global_attn_every_n_layers")),
    "later layers": attention(_later_layers),
    "all or none": attention(_all_or_none),
    "exaone": attention(_exaone),
    "dots1": attention(_dots1),
    "cohere2": attention(periodic("sliding_window_pattern"), _longer),
    "cohere_compass": attention(patterned(lambda index, count: False), _longer),
    "cohere2_moe": attention(_cohere2_moe, _longer),
    "gpt_oss": attention(_gpt_oss),
    "smollm3": attention(_smollm3),
    "modernbert": attention(_modernbert, _half),
    "step3p5": attention(_step3p5),
    "mimo_v2": attention(_mimo_v2, _mimo_v2_sizes),
    "gemma4": attention(_gemma4, _gemma4_sizes),
    "llama4": attention(_llama4, _chunk),
}
"""Readers by the name that families.toml has for each."""

"""Latents and the indexers that pick tokens to read: DeepSeek-V3 and its kin, V3.2 and GLM-5, V4, MiniMax-M3."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hkv.errors import ConfigError
from hkv.model.huggingface.decoder import Decoder, every_layer, layer_name
from hkv.model.huggingface.families.attention import FULL
from hkv.model.huggingface.fields import Field, Fields
from hkv.model.huggingface.model import CacheLayer, Model
from hkv.spec import MLAAttention, SlidingWindowMLA

SIZE = "sliding_window_size"

Flags = list[tuple[bool, tuple[str, ...]]]
"""Of each layer whether it has an indexer of its own, and the fields that say so."""

KERNEL_BLOCK = 64
"""Tokens per block of the kernels that read picked tokens (vLLM 0.33 `FlashMLASparseBackend`)."""

SPARSE_BLOCK = 128
"""Tokens per block of the kernels that read picked blocks (vLLM 0.33 `MiniMaxM3SparseBackend`)."""

SCALED = 128
"""Elements that share one float32 scale in an indexer's cache."""


def _longcat(decoder: Decoder) -> Model:
    """Two attentions a decoder layer, each with a cache (vLLM 0.33 `FlashDecoderLayer`)."""
    count = decoder.fields.integer("num_layers")
    for index in range(count.value):
        for part in range(2):
            decoder.latent(index, part=f"self_attn.{part}")
    return decoder.model(count.value)


def _indexed(indexers: Callable[[Fields], Flags]) -> Callable[[Decoder], Model]:
    """A reader of a latent in each layer, and an indexer's keys in those that have one."""

    def read(decoder: Decoder) -> Model:
        found = indexers(decoder.fields)
        decoder.default_block_size = KERNEL_BLOCK
        for index, (own, names) in enumerate(found):
            decoder.latent(index, names, indexed=own)
            if own:
                _add_indexer(decoder, index, names)
        return decoder.model(len(found), layouts=None)

    return read


def _hy_v4(fields: Fields) -> Flags:
    """By `indexer_types`, else an indexer in layer 0 and in every fourth from layer 1 on."""
    listed = fields.names("indexer_types", {"full": "full", "shared": "shared"})
    place = (fields.place("indexer_types"),)
    default: Flags = [(index == 0 or (index - 1) % 4 == 0, place) for index in range(fields.num_layers)]
    return default if listed is None else [(kind == "full", (name,)) for kind, name in listed]


def _dots3_note(decoder: Decoder) -> Model:
    """Latents with an indexer, padded to the larger ones of layers that have a window (vLLM 0.33 `dots3_note`)."""
    fields, kv_dtype = decoder.fields, decoder.options.kv_dtype
    if kv_dtype not in ("auto", decoder.dtype[0]):
        raise ConfigError("kv_dtype", kv_dtype, "auto for dots3_note: no other type of its padded latents is known")
    sizes = fields.integer("swa_kv_lora_rank"), fields.integer("swa_qk_rope_head_dim")
    own, window = fields.integer("kv_lora_rank").plus(fields.integer("qk_rope_head_dim")), fields.integer(SIZE)
    if own.value > sizes[0].plus(sizes[1]).value:
        raise ConfigError(" + ".join(own.names), own.value, "no larger latents than those of layers with a window")
    decoder.default_block_size = KERNEL_BLOCK
    layers = fields.names("layer_types", {FULL: FULL, WINDOW: WINDOW})
    if layers is None:
        raise ConfigError(fields.place("layer_types"), None, f"{FULL} or {WINDOW}, layer by layer")
    for index, (kind, name) in enumerate(layers):
        decoder.latent(index, (name,), sizes=sizes, indexed=kind == FULL, window=window if kind == WINDOW else None)
        if kind == FULL:
            _add_indexer(decoder, index, (name,))
    return decoder.model(len(layers), layouts=("BLHNC",))


def _schedule(fields: Fields) -> Flags:
    """By a pattern or a frequency; the other layers read an earlier one's picks (vLLM 0.33 `DeepseekV32Attention`).

    vLLM 0.33 does not read `indexer_types`: a file in which it says otherwise is refused.
    """
    count = fields.num_layers
    pattern, place = fields.raw("index_topk_pattern"), fields.place("index_topk_pattern")
    if pattern is None:
        frequency, offset = fields.integer("index_topk_freq"), fields.count("index_skip_topk_offset")
        names = (*frequency.names, fields.place("index_skip_topk_offset"))
        found: Flags = [(max(index - offset + 1, 0) % frequency.value == 0, names) for index in range(count)]
    elif isinstance(pattern, str) and set(pattern) <= {"F", "S"}:
        found = [(pattern[i : i + 1] != "S", (f"{place}[{i}]" if i < len(pattern) else place,)) for i in range(count)]
    else:
        raise ConfigError(place, pattern, "letters F (an indexer of its own) and S (shared), one a layer")
    for index, (kind, name) in enumerate(fields.names("indexer_types", {"full": "full", "shared": "shared"}) or []):
        if (kind == "full") != found[index][0]:
            says = "an indexer" if found[index][0] else "none"
            raise ConfigError(name, kind, f"{says} there, as index_topk_freq and index_topk_pattern say to vLLM 0.33")
    return found


def _add_indexer(
    decoder: Decoder, index: int, kind_fields: tuple[str, ...], tokens: int = 1, alignment: int | None = None
) -> None:
    """Adds an indexer's cache, a key for so many tokens: float8, and a float32 scale for every 128 elements."""
    size = decoder.fields.integer("index_head_dim")
    geometry = {
        "head_size": size.value + size.value // SCALED * 4,
        "dtype": "uint8",
        "quantization": "fp8_indexer",
        "cache_role": "indexer" if tokens == 1 else None,
        "tokens_per_state": tokens,
        "alignment": alignment,
        "max_tp_shards": 1,
    }
    _add_keys(decoder, index, (*kind_fields, *size.names), size, geometry)


def _add_keys(
    decoder: Decoder, index: int, kind_fields: tuple[str, ...], size: Field, geometry: Mapping[str, Any]
) -> None:
    """Adds an indexer's keys, one vector each."""
    shared = {"num_kv_heads": 1, "cp_sharded": True, "is_draft": decoder.options.draft}
    spec = MLAAttention(block_size=decoder.block_size, **shared, **geometry)
    origin = {"kind": kind_fields, "size": size.names}
    full = spec.content_bytes if spec.cache_role else 0
    decoder.layers.append(CacheLayer(layer_name(index, "indexer"), index, spec, origin, full_token_bytes=full))


# MiniMax-M3: keys and values in each layer, and an indexer's keys besides those of sparse ones.

SPARSE = "minimax_m3_sparse"


def _minimax_m3(decoder: Decoder) -> Model:
    fields = decoder.fields
    layers = _sparse_layers(fields)
    if any(sparse for sparse, _ in layers):
        decoder.default_block_size = SPARSE_BLOCK
    for index, (sparse, names) in enumerate(layers):
        decoder.attention(index, FULL, names)
        if sparse:
            size = fields.inside("sparse_attention_config", "sparse_index_dim") or fields.integer("index_head_dim")
            _add_keys(decoder, index, names, size, {"head_size": size.value, "cache_role": "indexer"})
    return decoder.model(len(layers))


def _sparse_layers(fields: Fields) -> Flags:
    """By `sparse_attention_config`, which is what vLLM 0.33 reads; `layer_types` may not say otherwise."""
    count, place = fields.num_layers, f"{fields.place('sparse_attention_config')}.sparse_attention_freq"
    flags = fields.nested("sparse_attention_config").get("sparse_attention_freq")
    listed = fields.names("layer_types", {FULL: FULL, SPARSE: SPARSE})
    if flags is None:
        if listed and any(kind == SPARSE for kind, _ in listed):
            raise ConfigError(place, None, "a list of 0 and 1, by which vLLM 0.33 knows sparse layers")
        return [(False, (place,))] * count
    if not isinstance(flags, list) or len(flags) != count or not all(flag in (0, 1) for flag in flags):
        raise ConfigError(place, flags, f"a list of {count} entries, 0 or 1")
    for flag, (kind, name) in zip(flags, listed or [], strict=False):
        if bool(flag) != (kind == SPARSE):
            raise ConfigError(name, kind, "the kind that sparse_attention_config says")
    return [(bool(flag), (f"{place}[{i}]",)) for i, flag in enumerate(flags)]


# DeepSeek-V4: every layer has a window; most have a compressed cache beside it, and the state of its compressor.

WINDOW, HEAVY, COMPRESSED = "sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"
LEGACY = {0: WINDOW, 4: COMPRESSED, 128: HEAVY}
"""Types of layers by the numbers of `compress_ratios`."""

RATES = {COMPRESSED: 4, HEAVY: 128}
"""Tokens that a layer's cache compresses into one, where the file does not say."""

WINDOW_BLOCK = 64
STATE_BLOCKS = {4: 4, 128: 8}
"""Tokens per block of a compressor's state, by how many tokens it compresses into one (vLLM 0.33)."""

PACKED_BYTES = 584
"""Bytes of a packed vector of 512: 448 float8, 64 bfloat16, 8 of scales."""


def _deepseek_v4(decoder: Decoder) -> Model:
    """In the order in which vLLM 0.33 registers the caches."""
    decoder.default_block_size = 256
    packed = decoder.options.kv_dtype in ("auto", "fp8", "fp8_ds_mla")
    if not packed and decoder.options.kv_dtype != "bfloat16":
        raise ConfigError("kv_dtype", decoder.options.kv_dtype, "auto, fp8, fp8_ds_mla or bfloat16 for deepseek_v4")
    layers = _deepseek_v4_kinds(decoder.fields)
    for index, (kind, name) in enumerate(layers):
        _add_compressed(decoder, index, kind, name, packed=packed)
    return decoder.model(len(layers), layouts=("BLHNC", "BLNHC"))


def _deepseek_v4_kinds(fields: Fields) -> list[tuple[str, str]]:
    """By `layer_types`, else `compress_ratios`, else two heavily compressed layers, then both kinds in turn."""
    listed, count = fields.names("layer_types"), fields.num_layers
    if listed is not None:
        return listed
    ratios = fields.integers("compress_ratios")
    if ratios is None:
        place = fields.place("layer_types")
        return [(COMPRESSED if i >= 2 and i % 2 else HEAVY, place) for i in range(count)]
    if len(ratios) < count:
        raise ConfigError(fields.place("compress_ratios"), len(ratios), f"at least {count} entries, one a layer")
    for ratio in ratios[:count]:
        if ratio.value not in LEGACY:
            raise ConfigError(ratio.names[0], ratio.value, f"one of {', '.join(map(str, LEGACY))}")
    return [(LEGACY[ratio.value], ratio.names[0]) for ratio in ratios[:count]]


def _add_compressed(decoder: Decoder, index: int, kind: str, name: str, *, packed: bool) -> None:
    fields, alignment = decoder.fields, 576 if packed else 512
    ratio = _ratio(fields, kind, name)
    head, kind_fields = fields.integer("head_dim"), (name, *ratio.names)
    if ratio.value == 4:
        indexed = fields.integer("index_head_dim")
        _add_indexer(decoder, index, kind_fields, tokens=4, alignment=alignment)
        _add_compressor(decoder, index, "indexer.state", indexed, ratio, alignment, kind_fields)
    window = fields.integer("sliding_window")
    content = PACKED_BYTES if packed else 2 * head.value
    geometry = {
        "num_kv_heads": 1,
        "max_tp_shards": 1,
        "head_size": head.value,
        "dtype": "uint8" if packed else "bfloat16",
        "quantization": "fp8_ds_mla_v4" if packed else "none",
        "cache_dtype": "fp8_ds_mla" if packed else "bfloat16",
        "state_content_bytes": PACKED_BYTES if packed else None,
        "alignment": alignment,
        "model_version": "deepseek_v4",
        "is_draft": decoder.options.draft,
    }
    alone = decoder.options.context_parallel == 1
    swa = SlidingWindowMLA(block_size=WINDOW_BLOCK, window=window.value, cp_sharded=alone, **geometry)
    size = () if packed else head.names
    origin = {"kind": (), "size": size, "declared": head.names, "window": window.names}
    decoder.layers.append(CacheLayer(f"layers.{index}.window", index, swa, origin, full_token_bytes=content))
    if ratio.value > 1:
        latent = MLAAttention(block_size=decoder.block_size, tokens_per_state=ratio.value, cp_sharded=True, **geometry)
        origin = {"kind": kind_fields, "size": size, "declared": head.names}
        decoder.layers.append(CacheLayer(f"layers.{index}.compressed", index, latent, origin))
        _add_compressor(decoder, index, "state", head, ratio, alignment, kind_fields)


def _add_compressor(
    decoder: Decoder, index: int, part: str, head: Field, ratio: Field, alignment: int, kind_fields: tuple[str, ...]
) -> None:
    """A compressor's state: float32 keys and scores of the tokens not yet compressed, twice where windows overlap."""
    overlap = 2 if ratio.value == 4 else 1
    spec = SlidingWindowMLA(
        block_size=STATE_BLOCKS[ratio.value],
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=2 * overlap * head.value,
        dtype="float32",
        window=overlap * ratio.value,
        alignment=alignment,
        cp_sharded=decoder.options.context_parallel == 1,
        is_draft=decoder.options.draft,
    )
    origin = {"kind": kind_fields, "size": head.names, "window": ratio.names}
    decoder.layers.append(CacheLayer(f"layers.{index}.{part}", index, spec, origin))


def _ratio(fields: Fields, kind: str, name: str) -> Field:
    """Tokens that the layer's cache compresses into one; 1 for a window alone."""
    rates = dict.fromkeys(fields.nested("compress_rates")) if fields.given("compress_rates") else RATES
    if kind not in rates:
        if kind != WINDOW:
            raise ConfigError(name, kind, f"sliding_attention or one of compress_rates: {', '.join(sorted(rates))}")
        return Field(1, ())
    place = f"{fields.place('compress_rates')}.{kind}"
    rate = fields.inside("compress_rates", kind) or Field(rates[kind] or 0, (place,))
    if rate.value not in STATE_BLOCKS:
        raise ConfigError(rate.names[0], rate.value, f"one of {', '.join(map(str, STATE_BLOCKS))}")
    return rate


READERS: Mapping[str, Callable[[Decoder], Model]] = {
    "latent": every_layer(Decoder.latent),
    "longcat": _longcat,
    "indexed": _indexed(_schedule),
    "hy_v4": _indexed(_hy_v4),
    "dots3_note": _dots3_note,
    "minimax_m3": _minimax_m3,
    "deepseek_v4": _deepseek_v4,
}

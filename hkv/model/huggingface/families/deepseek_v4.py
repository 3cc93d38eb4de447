"""DeepSeek-V4: every layer has a window; most have a compressed cache beside it, and the state of its compressor."""

from __future__ import annotations

from hkv.errors import ConfigError
from hkv.model.huggingface.decoder import Decoder
from hkv.model.huggingface.families.indexed import add_indexer
from hkv.model.huggingface.family import Family, words
from hkv.model.huggingface.fields import Field, Fields
from hkv.model.huggingface.model import CacheLayer, Model
from hkv.spec import MLAAttention, SlidingWindowMLA

WINDOW, HEAVY, SPARSE = "sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"
LEGACY = {0: WINDOW, 4: SPARSE, 128: HEAVY}
"""Types of layers by the numbers of `compress_ratios`."""

WINDOW_BLOCK = 64
STATE_BLOCKS = {4: 4, 128: 8}
"""Tokens per block of a compressor's state, by how many tokens it compresses into one (vLLM 0.33)."""

PACKED_BYTES = 584
"""Bytes of a packed vector of 512: 448 float8, 64 bfloat16, 8 of scales."""


def read(decoder: Decoder) -> Model:
    """The caches of a DeepSeek-V4 decoder, in the order in which vLLM 0.33 registers them."""
    decoder.default_block_size = 256
    packed = decoder.options.kv_dtype in ("auto", "fp8", "fp8_ds_mla")
    if not packed and decoder.options.kv_dtype != "bfloat16":
        raise ConfigError("kv_dtype", decoder.options.kv_dtype, "auto, fp8, fp8_ds_mla or bfloat16 for deepseek_v4")
    layers = _kinds(decoder.fields)
    for index, (kind, name) in enumerate(layers):
        _layer(decoder, index, kind, name, packed=packed)
    return decoder.model(len(layers), layouts=("BLHNC", "BLNHC"))


def _kinds(fields: Fields) -> list[tuple[str, str]]:
    """By `layer_types`, else `compress_ratios`, else two heavily compressed layers, then both kinds in turn.

    Raises:
      ConfigError: a ratio that no type of layer has, or too few of them.
    """
    listed, count = fields.names("layer_types"), fields.num_layers
    if listed is not None:
        return listed
    ratios = fields.integers("compress_ratios")
    if ratios is None:
        place = fields.place("layer_types")
        return [(SPARSE if i >= 2 and i % 2 else HEAVY, place) for i in range(count)]
    if len(ratios) < count:
        raise ConfigError(fields.place("compress_ratios"), len(ratios), f"at least {count} entries, one a layer")
    for ratio in ratios[:count]:
        if ratio.value not in LEGACY:
            raise ConfigError(ratio.names[0], ratio.value, f"one of {', '.join(map(str, LEGACY))}")
    return [(LEGACY[ratio.value], ratio.names[0]) for ratio in ratios[:count]]


def _layer(decoder: Decoder, index: int, kind: str, name: str, *, packed: bool) -> None:
    fields, alignment = decoder.fields, 576 if packed else 512
    ratio = _ratio(fields, kind, name)
    head, kind_fields = fields.integer("head_dim"), (name, *ratio.names)
    if ratio.value == 4:
        indexed = fields.integer("index_head_dim")
        add_indexer(decoder, index, tokens_per_state=4, alignment=alignment, kind_fields=kind_fields)
        _state(decoder, index, "indexer.state", indexed, ratio, alignment, kind_fields)
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
    swa = SlidingWindowMLA(block_size=WINDOW_BLOCK, window=window.value, cp_sharded=_alone(decoder), **geometry)
    size = () if packed else head.names
    origin = {"kind": (), "size": size, "declared": head.names, "window": window.names}
    decoder.layers.append(CacheLayer(f"layers.{index}.window", index, swa, origin, full_token_bytes=content))
    if ratio.value > 1:
        latent = MLAAttention(block_size=decoder.block_size, tokens_per_state=ratio.value, cp_sharded=True, **geometry)
        origin = {"kind": kind_fields, "size": size, "declared": head.names}
        decoder.layers.append(CacheLayer(f"layers.{index}.compressed", index, latent, origin))
        _state(decoder, index, "state", head, ratio, alignment, kind_fields)


def _state(
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
        cp_sharded=_alone(decoder),
        is_draft=decoder.options.draft,
    )
    origin = {"kind": kind_fields, "size": head.names, "window": ratio.names}
    decoder.layers.append(CacheLayer(f"layers.{index}.{part}", index, spec, origin))


def _alone(decoder: Decoder) -> bool:
    return decoder.options.context_parallel == 1


RATES = {SPARSE: 4, HEAVY: 128}
"""Tokens that a layer's cache compresses into one, where the file does not say."""


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


FAMILIES = {
    "deepseek_v4": Family(
        "DeepSeek-V4",
        read,
        {
            "num_hidden_layers": 43,
            "head_dim": 512,
            "max_position_embeddings": 1048576,
            "layer_types": None,
            "compress_ratios": None,
            "compress_rates": None,
            "sliding_window": 128,
            "index_head_dim": 128,
        },
        words(
            """hidden_size num_attention_heads num_key_value_heads qk_rope_head_dim o_groups o_lora_rank index_topk
            index_n_heads compress_rope_theta num_hash_layers"""
        ),
    ),
}

"""DeepSeek-V3.2 and GLM-5: latent attention, and indexers that pick the tokens to read."""

from __future__ import annotations

from hkv.errors import ConfigError
from hkv.model.huggingface.decoder import Decoder, layer_name
from hkv.model.huggingface.families.latent import SIZES
from hkv.model.huggingface.family import Family
from hkv.model.huggingface.fields import Fields
from hkv.model.huggingface.model import CacheLayer, Model
from hkv.spec import MLAAttention

KERNEL_BLOCK = 64
"""Tokens per block of the kernels that read picked tokens (vLLM 0.33 `FlashMLASparseBackend`)."""

SCALED = 128
"""Elements that share one float32 scale in an indexer's cache."""

SCHEDULE = {"index_topk_pattern": None, "index_topk_freq": 1, "index_skip_topk_offset": 2, "indexer_types": None}
"""Fields that say which layers have an indexer of their own; the others read the tokens that an earlier one picked."""


def _read(decoder: Decoder) -> Model:
    return _layers(decoder, _indexers(decoder.fields))


def _hy_v4(decoder: Decoder) -> Model:
    """By `indexer_types`, else an indexer in layer 0 and in every fourth from layer 1 on."""
    fields = decoder.fields
    listed = fields.names("indexer_types", {"full": "full", "shared": "shared"})
    place = (fields.place("indexer_types"),)
    default = [(index == 0 or (index - 1) % 4 == 0, place) for index in range(fields.num_layers)]
    return _layers(decoder, default if listed is None else [(kind == "full", (name,)) for kind, name in listed])


def _layers(decoder: Decoder, indexers: list[tuple[bool, tuple[str, ...]]]) -> Model:
    """A latent for each layer, and an indexer's keys for each layer that has one."""
    decoder.default_block_size = KERNEL_BLOCK
    for index, (own, names) in enumerate(indexers):
        decoder.latent(index, names, indexed=own)
        if own:
            add_indexer(decoder, index, tokens_per_state=1, alignment=None, kind_fields=names)
    return decoder.model(len(indexers), layouts=None)


def _indexers(fields: Fields) -> list[tuple[bool, tuple[str, ...]]]:
    """Flags of the layers with an indexer, and the fields that say so (vLLM 0.33 `DeepseekV32Attention`).

    Raises:
      ConfigError: an impossible pattern; or `indexer_types`, which vLLM 0.33 does not read, says otherwise.
    """
    count = fields.num_layers
    pattern, place = fields.raw("index_topk_pattern"), fields.place("index_topk_pattern")
    if pattern is None:
        frequency, offset = fields.integer("index_topk_freq"), fields.count("index_skip_topk_offset")
        names = (*frequency.names, fields.place("index_skip_topk_offset"))
        found = [(max(index - offset + 1, 0) % frequency.value == 0, names) for index in range(count)]
    elif isinstance(pattern, str) and set(pattern) <= {"F", "S"}:
        found = [(pattern[i : i + 1] != "S", (f"{place}[{i}]" if i < len(pattern) else place,)) for i in range(count)]
    else:
        raise ConfigError(place, pattern, "letters F (an indexer of its own) and S (shared), one a layer")
    for index, (kind, name) in enumerate(fields.names("indexer_types", {"full": "full", "shared": "shared"}) or []):
        if (kind == "full") != found[index][0]:
            says = "an indexer" if found[index][0] else "none"
            raise ConfigError(name, kind, f"{says} there, as index_topk_freq and index_topk_pattern say to vLLM 0.33")
    return found


def add_indexer(
    decoder: Decoder, index: int, *, tokens_per_state: int, alignment: int | None, kind_fields: tuple[str, ...]
) -> None:
    """Adds an indexer's cache: float8 keys and a float32 scale for every 128 elements (vLLM 0.33).

    Args:
      decoder: what the layer is added to.
      index: the decoder layer.
      tokens_per_state: tokens that share a key.
      alignment: bytes to which a page is rounded up, or None.
      kind_fields: fields that say that the layer has an indexer.
    """
    size = decoder.fields.integer("index_head_dim")
    content = size.value + size.value // SCALED * 4
    spec = MLAAttention(
        block_size=decoder.block_size,
        num_kv_heads=1,
        head_size=content,
        dtype="uint8",
        quantization="fp8_indexer",
        cache_role="indexer" if tokens_per_state == 1 else None,
        tokens_per_state=tokens_per_state,
        alignment=alignment,
        max_tp_shards=1,
        cp_sharded=True,
        is_draft=decoder.options.draft,
    )
    origin = {"kind": (*kind_fields, *size.names), "size": size.names}
    full = content if tokens_per_state == 1 else 0
    decoder.layers.append(CacheLayer(layer_name(index, "indexer"), index, spec, origin, full_token_bytes=full))


INERT = SIZES | {"index_topk", "index_n_heads", "index_share_for_mtp_iteration", "indexer_rope_interleave"}

FAMILIES = {
    "deepseek_v32": Family(
        "DeepSeek-V3.2",
        _read,
        {
            "num_hidden_layers": 61,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "index_head_dim": 128,
            "max_position_embeddings": 163840,
            **SCHEDULE,
        },
        INERT,
    ),
    "hy_v4": Family(
        "Hunyuan 4",
        _hy_v4,
        {
            "num_hidden_layers": 34,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "index_head_dim": 128,
            "max_position_embeddings": 262144,
            "indexer_types": None,
        },
        INERT | {"hc_mult", "hc_magnitude", "hc_eps", "learnable_sink_init"},
    ),
    "glm_moe_dsa": Family(
        "GLM-5",
        _read,
        {
            "num_hidden_layers": 78,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "index_head_dim": 128,
            "max_position_embeddings": 202752,
            **SCHEDULE,
        },
        INERT,
    ),
}

"""MiniMax-M3: full attention, in most layers over tokens that an indexer picks."""

from __future__ import annotations

from collections.abc import Mapping

from hkv.errors import ConfigError
from hkv.model.huggingface.decoder import Decoder, layer_name
from hkv.model.huggingface.family import Family, words
from hkv.model.huggingface.fields import Field, Fields
from hkv.model.huggingface.layer_kinds import FULL
from hkv.model.huggingface.model import CacheLayer, Model
from hkv.spec import MLAAttention

SPARSE_BLOCK = 128
"""Tokens per block of the kernels that read picked blocks (vLLM 0.33 `MiniMaxM3SparseBackend`)."""

SPARSE = "minimax_m3_sparse"


def _read(decoder: Decoder) -> Model:
    """Keys and values for each layer, and for a sparse one its indexer's keys."""
    fields = decoder.fields
    layers = _kinds(fields)
    if any(sparse for sparse, _ in layers):
        decoder.default_block_size = SPARSE_BLOCK
    for index, (sparse, names) in enumerate(layers):
        decoder.attention(index, FULL, names)
        if sparse:
            _add_indexer(decoder, index, names)
    return decoder.model(len(layers))


def _kinds(fields: Fields) -> list[tuple[bool, tuple[str, ...]]]:
    """Flags of the sparse layers, by `sparse_attention_config`, which is what vLLM 0.33 reads.

    Raises:
      ConfigError: no list of 0 and 1; or `layer_types` says otherwise.
    """
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


def _add_indexer(decoder: Decoder, index: int, names: tuple[str, ...]) -> None:
    """The indexer's keys, in bfloat16."""
    fields = decoder.fields
    size = fields.inside("sparse_attention_config", "sparse_index_dim") or fields.integer("index_head_dim")
    spec = MLAAttention(
        block_size=decoder.block_size,
        num_kv_heads=1,
        head_size=size.value,
        dtype="bfloat16",
        cache_role="indexer",
        cp_sharded=True,
        is_draft=decoder.options.draft,
    )
    origin: Mapping[str, tuple[str, ...]] = {"kind": names, "size": size.names}
    full = Field(size.value * 2, ()).value
    decoder.layers.append(CacheLayer(layer_name(index, "indexer"), index, spec, origin, full_token_bytes=full))


FAMILIES = {
    "minimax_m3_vl_text": Family(
        "MiniMax-M3",
        _read,
        {
            "hidden_size": 6144,
            "num_hidden_layers": 60,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "sparse_attention_config": None,
            "layer_types": None,
            "index_head_dim": 128,
        },
        words(
            """index_n_heads index_block_size index_topk_blocks index_local_blocks dense_intermediate_size rotary_dim
            moe_layer_freq"""
        ),
    ),
}

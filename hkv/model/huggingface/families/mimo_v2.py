"""MiMo-V2: window layers have key/value heads of their own number, and values are narrower than keys."""

from __future__ import annotations

from hkv.model.huggingface.decoder import Decoder
from hkv.model.huggingface.family import REQUIRED, Family, words
from hkv.model.huggingface.fields import Field, Fields
from hkv.model.huggingface.layer_kinds import FULL, KNOWN, SLIDING, Kinds
from hkv.model.huggingface.model import Model


def _read(decoder: Decoder) -> Model:
    fields = decoder.fields
    layers, own = _kinds(fields), fields.integer("v_head_dim")
    for index, (kind, names) in enumerate(layers):
        local = kind == SLIDING
        decoder.attention(
            index,
            kind,
            names,
            heads=_window_heads(fields) if local else fields.derived("num_key_value_heads", fields.kv_heads),
            head_dim=_window_size(fields, "swa_head_dim", fields.head_dim) if local else fields.head_dim,
            value_dim=_window_size(fields, "swa_v_head_dim", own) if local else own,
            window=(fields.optional("sliding_window_size") or fields.integer("sliding_window")) if local else None,
        )
    return decoder.model(len(layers))


def _window_heads(fields: Fields) -> Field:
    """Key/value heads of a window layer: given, or twice those of a full layer."""
    name = "swa_num_key_value_heads"
    return fields.optional(name) or fields.derived(name, fields.kv_heads.times(2))


def _window_size(fields: Fields, name: str, own: Field) -> Field:
    """Elements of a key or a value of a window layer: given, or those of a full layer."""
    return fields.optional(name) or fields.derived(name, own)


def _kinds(fields: Fields) -> Kinds:
    """By `hybrid_layer_pattern`, else `layer_types`, else full attention in the first layer and every sixth."""
    pattern = fields.flags("hybrid_layer_pattern")
    if pattern is not None:
        return [(SLIDING if flag else FULL, (place,)) for flag, place in pattern]
    listed = fields.names("layer_types", KNOWN)
    if listed is not None:
        return [(kind, (place,)) for kind, place in listed]
    place = (fields.place("hybrid_layer_pattern"),)
    return [(FULL if i == 0 or not (i + 1) % 6 else SLIDING, place) for i in range(fields.num_layers)]


DECIDING = {
    "hidden_size": 4096,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "max_position_embeddings": 131072,
    "hybrid_layer_pattern": None,
    "layer_types": None,
    "sliding_window": 129,
    "sliding_window_size": None,
    "swa_num_key_value_heads": None,
    "swa_head_dim": None,
    "swa_v_head_dim": None,
}

INERT = words(
    """attention_value_scale swa_num_attention_heads swa_rope_theta add_swa_attention_sink_bias attention_chunk_size
    add_full_attention_sink_bias"""
)

FAMILIES = {
    "mimo_v2_flash": Family("MiMo-V2-Flash", _read, DECIDING, INERT),
    "mimo_v2": Family("MiMo-V2", _read, {name: REQUIRED if value else None for name, value in DECIDING.items()}, INERT),
}

"""Step-3 and Step-3.5."""

from __future__ import annotations

from hkv.model.huggingface.decoder import Decoder
from hkv.model.huggingface.family import Family, words
from hkv.model.huggingface.fields import Fields
from hkv.model.huggingface.layer_kinds import FULL, KNOWN, SLIDING, Kinds, window_of
from hkv.model.huggingface.model import Model


def _step3p5(decoder: Decoder) -> Model:
    fields = decoder.fields
    layers = _kinds(fields)
    for index, (kind, names) in enumerate(layers):
        decoder.attention(index, kind, names, window=window_of(fields) if kind == SLIDING else None)
    return decoder.model(len(layers))


def _kinds(fields: Fields) -> Kinds:
    """By `layer_types`, which may list the MTP layers too; without it all layers are full attention."""
    count, extra = fields.num_layers, fields.count("num_nextn_predict_layers")
    listed = fields.names("layer_types", KNOWN, (count, count + extra))
    if listed is None:
        return [(FULL, (fields.place("layer_types"),))] * count
    return [(kind, (place,)) for kind, place in listed[:count]]


def _step3(decoder: Decoder) -> Model:
    fields = decoder.fields
    count = fields.num_layers
    for index in range(count):
        decoder.attention(index, FULL, (), heads=fields.integer("num_attention_groups"))
    return decoder.model(count)


FAMILIES = {
    "step3p5": Family(
        "Step-3.5",
        _step3p5,
        {
            "hidden_size": 4096,
            "num_hidden_layers": 45,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 128000,
            "sliding_window": None,
            "layer_types": None,
            "num_nextn_predict_layers": 0,
        },
        words(
            """num_sliding_attention_heads attention_other_setting use_head_wise_attn_gate partial_rotary_factors
            moe_layers_enum use_rope_layers yarn_only_types max_seq_len att_impl_type"""
        ),
        spellings={"num_attention_groups": "num_key_value_heads", "num_mtp_layers": "num_nextn_predict_layers"},
    ),
    "step3_text": Family(
        "Step-3",
        _step3,
        {
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "num_attention_heads": 64,
            "num_attention_groups": 1,
            "head_dim": 256,
            "max_seq_len": 65536,
        },
        words("max_position_embedding share_q_dim norm_expert_weight moe_layers_enum"),
    ),
}

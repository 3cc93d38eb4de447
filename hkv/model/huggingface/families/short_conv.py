"""LFM2: short convolutions with attention in between."""

from __future__ import annotations

from hkv.model.huggingface.decoder import Decoder
from hkv.model.huggingface.family import REQUIRED, Family
from hkv.model.huggingface.fields import Fields
from hkv.model.huggingface.layer_kinds import FULL, Kinds
from hkv.model.huggingface.model import Model
from hkv.model.huggingface.state_shapes import short_conv

CONV = "conv"
KNOWN = {FULL: FULL, CONV: CONV, "short_conv": CONV}


def _lfm2(decoder: Decoder) -> Model:
    return _read(decoder, "conv_dim")


def _lfm2_moe(decoder: Decoder) -> Model:
    return _read(decoder, "hidden_size")


def _read(decoder: Decoder, width: str) -> Model:
    fields = decoder.fields
    layers, kernel = _kinds(fields), fields.integer("conv_L_cache")
    for index, (kind, names) in enumerate(layers):
        if kind == FULL:
            decoder.attention(index, kind, names)
            continue
        channels = fields.integer(width)
        shapes = short_conv(
            decoder.options.tensor_parallel,
            channels=channels.value,
            kernel=kernel.value,
            drafts=decoder.options.speculative_tokens,
        )
        decoder.state(index, names, shapes, (decoder.dtype,), (*channels.names, *kernel.names))
    return decoder.model(len(layers))


def _kinds(fields: Fields) -> Kinds:
    """By `layer_types`, else by `full_attn_idxs`, without which every layer is full attention."""
    listed = fields.names("layer_types", KNOWN)
    if listed is not None:
        return [(kind, (place,)) for kind, place in listed]
    full = fields.integers("full_attn_idxs") if "full_attn_idxs" in fields.family.fields else None
    count = fields.num_layers
    if full is None:
        return [(FULL, (fields.place("layer_types"),))] * count
    attention = {index.value for index in full}
    return [(FULL if i in attention else CONV, (fields.place("full_attn_idxs"),)) for i in range(count)]


FAMILIES = {
    "lfm2": Family(
        "LFM2",
        _lfm2,
        {
            "hidden_size": 2560,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 128000,
            "layer_types": None,
            "full_attn_idxs": None,
            "conv_dim": REQUIRED,
            "conv_L_cache": 3,
        },
    ),
    "lfm2_moe": Family(
        "LFM2 MoE",
        _lfm2_moe,
        {
            "hidden_size": 2048,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 128000,
            "layer_types": REQUIRED,
            "conv_L_cache": 3,
        },
    ),
}

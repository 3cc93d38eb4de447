"""Mamba layers: alone (Mamba, Falcon Mamba), or with attention in between (Jamba)."""

from __future__ import annotations

from hkv.model.huggingface.decoder import Decoder
from hkv.model.huggingface.family import Family
from hkv.model.huggingface.fields import Field
from hkv.model.huggingface.layer_kinds import FULL
from hkv.model.huggingface.model import Model
from hkv.model.huggingface.state_shapes import mamba1


def _jamba(decoder: Decoder) -> Model:
    fields = decoder.fields
    count = fields.num_layers
    period, offset = fields.integer("attn_layer_period"), fields.count("attn_layer_offset")
    names = (*period.names, fields.place("attn_layer_offset"))
    intermediate = fields.integer("mamba_expand").times(fields.integer("hidden_size"))
    for index in range(count):
        if index % period.value == offset:
            decoder.attention(index, FULL, names)
        else:
            _add(decoder, index, names, intermediate, fields.integer("mamba_d_state"), fields.integer("mamba_d_conv"))
    return decoder.model(count)


def _mamba(decoder: Decoder) -> Model:
    fields = decoder.fields
    count = fields.num_layers
    expanded = fields.integer("expand").times(fields.integer("hidden_size"))
    given = fields.optional("intermediate_size")
    intermediate = expanded if given is None else given
    for index in range(count):
        _add(decoder, index, (), intermediate, fields.integer("state_size"), fields.integer("conv_kernel"))
    return decoder.model(count)


def _add(
    decoder: Decoder, index: int, kind_fields: tuple[str, ...], intermediate: Field, state: Field, kernel: Field
) -> None:
    shapes = mamba1(
        decoder.options.tensor_parallel, intermediate=intermediate.value, state=state.value, kernel=kernel.value
    )
    dtypes = (decoder.dtype, decoder.state_dtype())
    decoder.state(index, kind_fields, shapes, dtypes, (*intermediate.names, *state.names, *kernel.names))


MAMBA = {
    "hidden_size": 768,
    "num_hidden_layers": 32,
    "expand": 2,
    "intermediate_size": None,
    "state_size": 16,
    "conv_kernel": 4,
}

FAMILIES = {
    "mamba": Family("Mamba", _mamba, MAMBA),
    "falcon_mamba": Family("Falcon Mamba", _mamba, MAMBA),
    "jamba": Family(
        "Jamba",
        _jamba,
        {
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 262144,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "mamba_expand": 2,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
        },
        only={"sliding_window": None},
    ),
}

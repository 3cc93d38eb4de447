"""Jamba: Mamba layers, one of every few full attention."""

from __future__ import annotations

from hkv.model.huggingface.decoder import Decoder
from hkv.model.huggingface.model import Model
from hkv.model.huggingface.state_shapes import mamba1

MODEL_TYPES = ("jamba",)


def read(decoder: Decoder) -> Model:
    """The caches of a Jamba decoder."""
    fields = decoder.fields
    count = fields.num_layers
    period, offset = fields.integer("attn_layer_period"), fields.count("attn_layer_offset")
    names = (*period.names, fields.path + "attn_layer_offset")
    for index in range(count):
        if index % period.value == offset:
            decoder.attention(index, "full_attention", names)
        else:
            _mamba(decoder, index, names)
    return decoder.model(count)


def _mamba(decoder: Decoder, index: int, names: tuple[str, ...]) -> None:
    fields = decoder.fields
    intermediate = fields.integer("mamba_expand").times(fields.integer("hidden_size"))
    state, kernel = fields.integer("mamba_d_state"), fields.integer("mamba_d_conv")
    shapes = mamba1(
        decoder.options.tensor_parallel, intermediate=intermediate.value, state=state.value, kernel=kernel.value
    )
    dtypes = (decoder.dtype, decoder.state_dtype())
    decoder.state(index, names, shapes, dtypes, (*intermediate.names, *state.names, *kernel.names))

"""Granite 4 hybrid: Mamba-2 layers with full attention in between."""

from __future__ import annotations

from hkv.model.huggingface.decoder import Decoder
from hkv.model.huggingface.families.standard import layer_kinds
from hkv.model.huggingface.fields import Field
from hkv.model.huggingface.model import Model
from hkv.model.huggingface.state_shapes import mamba2

MODEL_TYPES = ("granitemoehybrid",)

KINDS = {
    "linear_attention": "mamba",
    "mamba": "mamba",
    "full_attention": "full_attention",
    "attention": "full_attention",
}


def read(decoder: Decoder) -> Model:
    """The caches of a Granite hybrid decoder; without a list of layer types all layers are Mamba-2."""
    fields = decoder.fields
    if fields.has("layer_types"):
        layers = layer_kinds(fields, known=KINDS)
    else:
        layers = [("mamba", ())] * fields.num_layers
    for index, (kind, names) in enumerate(layers):
        if kind == "full_attention":
            decoder.attention(index, kind, names)
        else:
            _mamba(decoder, index, names)
    return decoder.model(len(layers))


def _mamba(decoder: Decoder, index: int, names: tuple[str, ...]) -> None:
    fields = decoder.fields
    intermediate = fields.integer("mamba_expand", default=2).times(fields.integer("hidden_size"))
    heads = fields.integer("mamba_n_heads")
    if fields.raw("mamba_d_head", "auto") == "auto":
        head_dim = Field(intermediate.value // heads.value, (*intermediate.names, *heads.names))
    else:
        head_dim = fields.integer("mamba_d_head")
    groups, state = fields.integer("mamba_n_groups", default=1), fields.integer("mamba_d_state")
    kernel = fields.integer("mamba_d_conv")
    shapes = mamba2(
        decoder.options.tensor_parallel,
        intermediate=intermediate.value,
        groups=groups.value,
        heads=heads.value,
        head_dim=head_dim.value,
        state=state.value,
        kernel=kernel.value,
        drafts=decoder.options.speculative_tokens,
    )
    sizes = (*intermediate.names, *heads.names, *head_dim.names, *groups.names, *state.names, *kernel.names)
    decoder.state(index, names, shapes, (decoder.dtype, decoder.state_dtype()), sizes, heads.names)

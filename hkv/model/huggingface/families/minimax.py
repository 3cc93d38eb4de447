"""MiniMax-01: lightning (linear) attention with full attention in between."""

from __future__ import annotations

from hkv.errors import ConfigError
from hkv.model.huggingface.decoder import Decoder
from hkv.model.huggingface.families.standard import layer_kinds
from hkv.model.huggingface.fields import Fields
from hkv.model.huggingface.model import Model
from hkv.model.huggingface.state_shapes import lightning

MODEL_TYPES = ("minimax", "minimax_text_01")

KINDS = {"full_attention": "full_attention", "linear_attention": "linear_attention"}


def read(decoder: Decoder) -> Model:
    """The caches of a MiniMax-01 decoder. Its states have the model's element type unless the options say otherwise."""
    fields = decoder.fields
    layers = _kinds(fields)
    for index, (kind, names) in enumerate(layers):
        if kind == "full_attention":
            decoder.attention(index, kind, names)
            continue
        heads, head_dim = fields.integer("num_attention_heads"), fields.head_dim
        shapes = lightning(decoder.options.tensor_parallel, heads=heads.value, head_dim=head_dim.value)
        sizes = (*heads.names, *head_dim.names)
        decoder.state(index, names, shapes, (decoder.state_dtype(),), sizes, heads.names)
    return decoder.model(len(layers))


def _kinds(fields: Fields) -> list[tuple[str, tuple[str, ...]]]:
    flags = fields.raw("attn_type_list")
    if fields.has("layer_types") or flags is None:
        return layer_kinds(fields, known=KINDS)
    name = fields.path + "attn_type_list"
    if not isinstance(flags, list) or not all(flag in (0, 1) for flag in flags):
        raise ConfigError(name, flags, "a list of 0 (linear) and 1 (full attention)")
    kinds = ("linear_attention", "full_attention")
    return [(kinds[flag], (f"{name}[{i}]",)) for i, flag in enumerate(flags)]

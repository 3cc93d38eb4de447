"""Kimi Linear: Kimi delta attention with latent attention in between."""

from __future__ import annotations

from hkv.errors import ConfigError
from hkv.model.huggingface.decoder import Decoder
from hkv.model.huggingface.families.standard import layer_kinds
from hkv.model.huggingface.fields import Field, Fields
from hkv.model.huggingface.model import Model
from hkv.model.huggingface.state_shapes import kimi_delta

MODEL_TYPES = ("kimi_linear",)

KINDS = {"full_attention": "full_attention", "linear_attention": "linear_attention"}


def read(decoder: Decoder) -> Model:
    """The caches of a Kimi Linear decoder."""
    decoder.default_block_size = 64
    layers = _kinds(decoder.fields)
    for index, (kind, names) in enumerate(layers):
        if kind == "full_attention":
            decoder.latent(index, names)
        else:
            _delta(decoder, index, names)
    return decoder.model(len(layers))


def _kinds(fields: Fields) -> list[tuple[str, tuple[str, ...]]]:
    nested = fields.raw("linear_attn_config")
    if isinstance(nested, dict) and "full_attn_layers" in nested:
        name = fields.path + "linear_attn_config.full_attn_layers"
        full = nested["full_attn_layers"]
        if not isinstance(full, list) or not all(type(layer) is int for layer in full):
            raise ConfigError(name, full, "a list of layers, counted from 1")
        count = fields.num_layers
        kinds = ("linear_attention", "full_attention")
        return [(kinds[i + 1 in full], (name,)) for i in range(count)]
    if fields.has("layer_types"):
        return layer_kinds(fields, known=KINDS)
    count = fields.num_layers
    return [("full_attention" if i and i % 4 == 0 else "linear_attention", ()) for i in range(count)]


def _delta(decoder: Decoder, index: int, names: tuple[str, ...]) -> None:
    fields = decoder.fields
    heads = _size(fields, "linear_num_heads", "num_heads")
    head_dim = _size(fields, "linear_head_dim", "head_dim")
    kernel = _size(fields, "linear_conv_kernel_dim", "short_conv_kernel_size")
    shapes = kimi_delta(
        decoder.options.tensor_parallel,
        heads=heads.value,
        head_dim=head_dim.value,
        kernel=kernel.value,
        drafts=decoder.options.speculative_tokens,
    )
    dtypes = (decoder.dtype, decoder.state_dtype(default="float32"))
    decoder.state(index, names, shapes, dtypes, (*heads.names, *head_dim.names, *kernel.names), heads.names)


def _size(fields: Fields, name: str, nested_name: str) -> Field:
    nested = fields.raw("linear_attn_config")
    if isinstance(nested, dict) and nested_name in nested:
        return Fields(nested, path=fields.path + "linear_attn_config.").integer(nested_name)
    return fields.integer(name)

"""Qwen3-Next and Qwen3.5: gated delta nets with full attention in between."""

from __future__ import annotations

from hkv.model.huggingface.decoder import Decoder
from hkv.model.huggingface.families.standard import layer_kinds
from hkv.model.huggingface.fields import Fields
from hkv.model.huggingface.model import Model
from hkv.model.huggingface.state_shapes import gated_delta_net

MODEL_TYPES = (
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
)


def read(decoder: Decoder) -> Model:
    """The caches of a Qwen3-Next or Qwen3.5 decoder."""
    fields = decoder.fields
    layers = _kinds(fields)
    for index, (kind, names) in enumerate(layers):
        if kind == "full_attention":
            decoder.attention(index, kind, names)
        else:
            _delta_net(decoder, index, names)
    return decoder.model(len(layers))


def _kinds(fields: Fields) -> list[tuple[str, tuple[str, ...]]]:
    if fields.has("layer_types"):
        return layer_kinds(fields, known={"full_attention": "full_attention", "linear_attention": "linear_attention"})
    interval = fields.integer("full_attention_interval", default=4)
    count = fields.num_layers
    kinds = ("linear_attention", "full_attention")
    return [(kinds[(i + 1) % interval.value == 0], interval.names) for i in range(count)]


def _delta_net(decoder: Decoder, index: int, names: tuple[str, ...]) -> None:
    fields = decoder.fields
    key_heads, value_heads = fields.integer("linear_num_key_heads"), fields.integer("linear_num_value_heads")
    key, value = fields.integer("linear_key_head_dim"), fields.integer("linear_value_head_dim")
    kernel = fields.integer("linear_conv_kernel_dim")
    shapes = gated_delta_net(
        decoder.options.tensor_parallel,
        key_heads=key_heads.value,
        value_heads=value_heads.value,
        key_dim=key.value,
        value_dim=value.value,
        kernel=kernel.value,
        drafts=decoder.options.speculative_tokens,
    )
    heads = (*key_heads.names, *value_heads.names)
    sizes = (*heads, *key.names, *value.names, *kernel.names)
    dtypes = (decoder.dtype, decoder.state_dtype("mamba_ssm_dtype"))
    decoder.state(index, names, shapes, dtypes, sizes, heads)

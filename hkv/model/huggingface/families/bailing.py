"""Ling 2.5 and 3: lightning attention or Kimi delta attention, with latent attention in between."""

from __future__ import annotations

from hkv.errors import ConfigError
from hkv.model.huggingface.decoder import Decoder
from hkv.model.huggingface.families.delta_net import add_kimi_delta
from hkv.model.huggingface.families.latent import SIZES
from hkv.model.huggingface.family import REQUIRED, Family, words
from hkv.model.huggingface.fields import Fields
from hkv.model.huggingface.model import Model
from hkv.model.huggingface.state_shapes import lightning

LIGHTNING, DELTA = "BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM"
"""Architectures, both of one `model_type`."""


def _read(decoder: Decoder) -> Model:
    """The last layer of each group is latent; in Ling 3 those after the last whole group too (vLLM 0.33)."""
    fields = decoder.fields
    architecture = _architecture(fields)
    count, group = fields.num_layers, fields.integer("layer_group_size")
    whole = count // group.value * group.value if architecture == DELTA else count
    for index in range(count):
        if (index + 1) % group.value == 0 or index >= whole:
            decoder.latent(index, group.names)
        elif architecture == DELTA:
            _add_delta(decoder, index, group.names)
        else:
            heads, head_dim = fields.integer("num_attention_heads"), fields.head_dim
            shapes = lightning(decoder.options.tensor_parallel, heads=heads.value, head_dim=head_dim.value)
            sizes = (*heads.names, *head_dim.names)
            decoder.state(index, group.names, shapes, (decoder.dtype,), sizes, heads.names)
    return decoder.model(count)


def _architecture(fields: Fields) -> str:
    """The one architecture that the file names.

    Raises:
      ConfigError: it names another, or none.
    """
    named = fields.raw("architectures")
    if not isinstance(named, list) or len(named) != 1 or named[0] not in (LIGHTNING, DELTA):
        raise ConfigError(fields.place("architectures"), named, f"[{LIGHTNING}] or [{DELTA}]")
    return named[0]


def _add_delta(decoder: Decoder, index: int, kind_fields: tuple[str, ...]) -> None:
    fields = decoder.fields
    heads, kernel = fields.integer("num_attention_heads"), fields.integer("short_conv_kernel_size")
    add_kimi_delta(decoder, index, kind_fields, heads, fields.head_dim, kernel)


FAMILIES = {
    "bailing_hybrid": Family(
        "Ling hybrid",
        _read,
        {
            "architectures": REQUIRED,
            "hidden_size": REQUIRED,
            "num_hidden_layers": REQUIRED,
            "num_attention_heads": REQUIRED,
            "head_dim": None,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "layer_group_size": REQUIRED,
            "short_conv_kernel_size": 4,
            "max_position_embeddings": REQUIRED,
        },
        (SIZES - {"hidden_size", "num_attention_heads", "head_dim"})
        | words(
            "group_norm_size linear_silu kda_safe_gate kda_lower_bound no_kda_lora rotary_type use_linear_silu block"
        ),
    ),
}

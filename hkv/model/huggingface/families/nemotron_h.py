"""Nemotron-H: Mamba-2, attention and feed-forward blocks, each a layer of its own."""

from __future__ import annotations

from hkv.errors import ConfigError
from hkv.model.huggingface.decoder import Decoder
from hkv.model.huggingface.fields import Fields
from hkv.model.huggingface.model import Model
from hkv.model.huggingface.state_shapes import mamba2

MODEL_TYPES = ("nemotron_h",)

LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
KINDS = {
    "linear_attention": "mamba",
    "mamba": "mamba",
    "full_attention": "attention",
    "attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}


def read(decoder: Decoder) -> Model:
    """The caches of a Nemotron-H decoder; feed-forward layers have none."""
    layers = _kinds(decoder.fields)
    for index, (kind, names) in enumerate(layers):
        if kind == "attention":
            decoder.attention(index, "full_attention", names)
        elif kind == "mamba":
            _mamba(decoder, index, names)
    return decoder.model(len(layers))


def _kinds(fields: Fields) -> list[tuple[str, tuple[str, ...]]]:
    pattern = fields.raw("hybrid_override_pattern")
    if isinstance(pattern, str) and not fields.has("layers_block_type"):
        name = fields.path + "hybrid_override_pattern"
        if strange := sorted(set(pattern) - LETTERS.keys()):
            raise ConfigError(name, strange[0], f"one of {' '.join(LETTERS)}")
        return [(LETTERS[letter], (f"{name}[{i}]",)) for i, letter in enumerate(pattern)]
    listed = fields.layer_types("layers_block_type", "layer_types")
    if listed is None:
        raise ConfigError(fields.path + "layers_block_type", None, "a list of layer types, or hybrid_override_pattern")
    for kind, name in listed:
        if kind not in KINDS:
            raise ConfigError(name, kind, f"one of {', '.join(sorted(KINDS))}")
    return [(KINDS[kind], (name,)) for kind, name in listed]


def _mamba(decoder: Decoder, index: int, names: tuple[str, ...]) -> None:
    fields = decoder.fields
    heads, head_dim = fields.integer("mamba_num_heads"), fields.integer("mamba_head_dim")
    groups, state = fields.integer("n_groups", "mamba_n_groups"), fields.integer("ssm_state_size")
    kernel = fields.integer("conv_kernel", "mamba_d_conv")
    shapes = mamba2(
        decoder.options.tensor_parallel,
        intermediate=heads.value * head_dim.value,
        groups=groups.value,
        heads=heads.value,
        head_dim=head_dim.value,
        state=state.value,
        kernel=kernel.value,
        drafts=decoder.options.speculative_tokens,
    )
    sizes = (*heads.names, *head_dim.names, *groups.names, *state.names, *kernel.names)
    dtypes = (decoder.dtype, decoder.state_dtype("mamba_ssm_cache_dtype", default="float32"))
    decoder.state(index, names, shapes, dtypes, sizes, heads.names)

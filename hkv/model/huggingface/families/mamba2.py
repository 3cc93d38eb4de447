"""Mamba-2 layers: alone, in between (Granite 4, Nemotron-H), beside attention (Falcon-H1), under it (Zamba2).

Each keeps one state inside a chunk of a prompt, at any token (vLLM 0.33 `MambaMixer2.get_kv_cache_spec`).
"""

from __future__ import annotations

import dataclasses

from hkv.errors import ConfigError
from hkv.model.huggingface.decoder import Decoder
from hkv.model.huggingface.family import Family, words
from hkv.model.huggingface.fields import Field, Fields
from hkv.model.huggingface.layer_kinds import FULL, Kinds, window_of
from hkv.model.huggingface.model import Model
from hkv.model.huggingface.state_shapes import mamba2

STATE = "linear_attention"
ANY_TOKEN = 1
"""Distance from a chunk's start at which a state may be kept inside it."""

KINDS = {STATE: STATE, "mamba": STATE, FULL: FULL, "attention": FULL}


@dataclasses.dataclass(frozen=True)
class Mixer:
    """Sizes of a Mamba-2 layer, each with the fields that decide it."""

    intermediate: Field
    groups: Field
    heads: Field
    head_dim: Field
    state: Field
    kernel: Field


def add_mixer(
    decoder: Decoder,
    index: int,
    kind_fields: tuple[str, ...],
    mixer: Mixer,
    *,
    part: str = "",
    state_field: tuple[str, ...] = (),
    state_default: str | None = None,
) -> None:
    """Adds a Mamba-2 layer's states.

    Args:
      decoder: what the layer is added to.
      index: the decoder layer.
      kind_fields: the fields that say that it is one.
      mixer: its sizes.
      part: which of several caches of the layer this is.
      state_field: fields that may name the element type of the recurrent state.
      state_default: that type where they do not; None for the model's.
    """
    sizes = [getattr(mixer, field.name) for field in dataclasses.fields(mixer)]
    shapes = mamba2(
        decoder.options.tensor_parallel,
        intermediate=mixer.intermediate.value,
        groups=mixer.groups.value,
        heads=mixer.heads.value,
        head_dim=mixer.head_dim.value,
        state=mixer.state.value,
        kernel=mixer.kernel.value,
        drafts=decoder.options.speculative_tokens,
    )
    names = tuple(name for size in sizes for name in size.names)
    dtypes = (decoder.dtype, decoder.state_dtype(*state_field, default=state_default))
    decoder.state(index, kind_fields, shapes, dtypes, names, mixer.heads.names, ANY_TOKEN, part)


def _expanded(fields: Fields) -> Mixer:
    """Of the fields `mamba_expand`, `mamba_n_heads`, ... (Granite 4, Falcon-H1)."""
    intermediate = fields.integer("mamba_expand").times(fields.integer("hidden_size"))
    if "mamba_d_ssm" in fields.family.fields:
        intermediate = fields.optional("mamba_d_ssm") or intermediate
    heads = fields.integer("mamba_n_heads")
    automatic = fields.raw("mamba_d_head") == "auto"
    head_dim = intermediate.over(heads) if automatic else fields.integer("mamba_d_head")
    groups, state, kernel = (fields.integer(f"mamba_{name}") for name in ("n_groups", "d_state", "d_conv"))
    return Mixer(intermediate, groups, heads, head_dim, state, kernel)


def _granite(decoder: Decoder) -> Model:
    """By `layer_types`; without it all layers are Mamba-2."""
    fields = decoder.fields
    listed = fields.names("layer_types", KINDS)
    places: Kinds = [(STATE, (fields.place("layer_types"),))] * fields.num_layers if listed is None else []
    for index, (kind, names) in enumerate(places or [(kind, (place,)) for kind, place in listed or []]):
        if kind == FULL:
            window = window_of(fields) if all(kind == FULL for kind, _ in places) else None
            decoder.attention(index, kind, names, window=window)
        else:
            add_mixer(decoder, index, names, _expanded(fields))
    return decoder.model(fields.num_layers)


def _falcon_h1(decoder: Decoder) -> Model:
    """Attention and Mamba-2 side by side in every layer."""
    fields = decoder.fields
    count = fields.num_layers
    for index in range(count):
        decoder.attention(index, FULL, ())
        add_mixer(decoder, index, (), _expanded(fields), part="mixer")
    return decoder.model(count)


LETTERS = {"M": STATE, "*": FULL, "-": "mlp", "E": "moe"}
BLOCKS = {**KINDS, "mlp": "mlp", "moe": "moe"}


def _nemotron_h(decoder: Decoder) -> Model:
    """Mamba-2, attention and feed-forward blocks, each a layer of its own; feed-forward has no cache."""
    fields = decoder.fields
    layers = _nemotron_kinds(fields)
    for index, (kind, name) in enumerate(layers):
        if kind == FULL:
            decoder.attention(index, kind, (name,))
        elif kind == STATE:
            heads, head_dim = fields.integer("mamba_num_heads"), fields.integer("mamba_head_dim")
            groups, state, kernel = (fields.integer(name) for name in ("n_groups", "ssm_state_size", "conv_kernel"))
            mixer = Mixer(heads.times(head_dim), groups, heads, head_dim, state, kernel)
            fields_of_type = ("mamba_ssm_cache_dtype",)
            add_mixer(decoder, index, (name,), mixer, state_field=fields_of_type, state_default="float32")
    return decoder.model(len(layers))


def _nemotron_kinds(fields: Fields) -> list[tuple[str, str]]:
    pattern, place = fields.raw("hybrid_override_pattern"), fields.place("hybrid_override_pattern")
    if pattern is None or fields.given("layers_block_type"):
        listed = fields.names("layers_block_type", BLOCKS)
        return listed or []
    if not isinstance(pattern, str) or not LETTERS.keys() >= set(pattern):
        raise ConfigError(place, pattern, f"a letter for each layer, one of {' '.join(LETTERS)}")
    return [(LETTERS[letter], f"{place}[{i}]") for i, letter in enumerate(pattern)]


def _zamba2(decoder: Decoder) -> Model:
    """A Mamba-2 state in every layer, and in hybrid ones shared attention with a cache of its own before it."""
    fields = decoder.fields
    kinds = fields.names("layers_block_type", {STATE: STATE, "mamba": STATE, "hybrid": "hybrid"}) or []
    heads = fields.integer("num_attention_heads")
    size = fields.integer("hidden_size").times(2).over(heads)
    for index, (kind, name) in enumerate(kinds):
        if kind == "hybrid":  # vLLM makes the attention of all layers before their states
            decoder.attention(index, FULL, (name,), heads=heads, head_dim=size, part="attn")
    for index in range(len(kinds)):
        intermediate = fields.integer("mamba_expand").times(fields.integer("hidden_size"))
        mamba_heads = fields.integer("n_mamba_heads")
        groups, state, kernel = (fields.integer(f"mamba_{name}") for name in ("ngroups", "d_state", "d_conv"))
        mixer = Mixer(intermediate, groups, mamba_heads, intermediate.over(mamba_heads), state, kernel)
        add_mixer(decoder, index, (), mixer)
    return decoder.model(len(kinds))


def _mamba2(decoder: Decoder) -> Model:
    fields = decoder.fields
    count = fields.num_layers
    for index in range(count):
        expanded = fields.integer("expand").times(fields.integer("hidden_size"))
        intermediate = fields.optional("intermediate_size") or expanded
        heads, head_dim = fields.integer("num_heads"), fields.integer("head_dim")
        groups, state, kernel = (fields.integer(name) for name in ("n_groups", "state_size", "conv_kernel"))
        add_mixer(decoder, index, (), Mixer(intermediate, groups, heads, head_dim, state, kernel))
    return decoder.model(count)


ZAMBA2_BLOCKS = (
    [STATE] + ([STATE] * 5 + ["hybrid"]) * 7 + [STATE] * 4 + ["hybrid"] + [STATE] * 3 + ["hybrid"] + [STATE] * 2
)

FAMILIES = {
    "granitemoehybrid": Family(
        "Granite 4",
        _granite,
        {
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": None,
            "max_position_embeddings": 2048,
            "sliding_window": None,
            "layer_types": None,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_head": "auto",
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        },
        words("mamba_chunk_size mamba_conv_bias mamba_proj_bias shared_intermediate_size position_embedding_type"),
        spellings={"layers_block_type": "layer_types"},
    ),
    "falcon_h1": Family(
        "Falcon-H1",
        _falcon_h1,
        {
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": None,
            "max_position_embeddings": 8192,
            "mamba_d_ssm": 1024,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_head": "auto",
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        },
    ),
    "nemotron_h": Family(
        "Nemotron-H",
        _nemotron_h,
        {
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "layers_block_type": [STATE, "moe", FULL, "mlp"],
            "hybrid_override_pattern": None,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
            "mamba_ssm_cache_dtype": "float32",
        },
        words("num_hidden_layers expand mamba_expand"),
        only={"sliding_window": None},
        spellings={"layer_types": "layers_block_type", "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel"},
    ),
    "zamba2": Family(
        "Zamba2",
        _zamba2,
        {
            "hidden_size": 2560,
            "num_hidden_layers": 54,
            "num_attention_heads": 32,
            "max_position_embeddings": 4096,
            "layers_block_type": ZAMBA2_BLOCKS,
            "mamba_d_state": 64,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_ngroups": 1,
            "n_mamba_heads": 8,
        },
        words("num_key_value_heads attention_hidden_size attention_head_dim head_dim mamba_headdim hybrid_layer_ids"),
        only={"use_long_context": False},
        spellings={"layer_types": "layers_block_type"},
    ),
    "mamba2": Family(
        "Mamba-2",
        _mamba2,
        {
            "hidden_size": 4096,
            "num_hidden_layers": 64,
            "num_heads": 128,
            "head_dim": 64,
            "expand": 2,
            "intermediate_size": None,
            "n_groups": 8,
            "state_size": 128,
            "conv_kernel": 4,
        },
    ),
}

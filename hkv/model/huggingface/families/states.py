"""Recurrent states: Mamba, Mamba-2 and short convolutions, alone or with attention in between or beside them.

Shapes on one tensor-parallel rank are those of vLLM 0.33's `MambaStateShapeCalculator`: a convolution's state is
`[kernel - 1 + draft tokens, channels]`, channels innermost; the recurrent state follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hkv.errors import ConfigError
from hkv.model.huggingface.decoder import Decoder, every_layer
from hkv.model.huggingface.families.attention import FULL, Kinds, listed, window_of
from hkv.model.huggingface.fields import Field, Fields
from hkv.model.huggingface.model import Model

Shapes = tuple[tuple[int, ...], ...]

Typed = tuple[str, tuple[str, ...]]
"""An element type and the fields that decide it."""

STATE, CONV = "linear_attention", "conv"

MAMBA_KINDS = {STATE: STATE, "mamba": STATE, FULL: FULL, "attention": FULL}
NEMOTRON_KINDS = {**MAMBA_KINDS, "mlp": "mlp", "moe": "moe"}
CONV_KINDS = {FULL: FULL, CONV: CONV, "short_conv": CONV}

ANY_TOKEN = 1
"""Distance from a chunk's start at which Mamba-2 may keep a state inside it (`MambaMixer2.get_kv_cache_spec`)."""


def mamba1(ranks: int, *, intermediate: int, state: int, kernel: int) -> Shapes:
    """Convolution and state of a Mamba layer."""
    channels = _share("intermediate size", intermediate, ranks)
    return (kernel - 1, channels), (channels, state)


def mamba2(
    ranks: int, *, intermediate: int, groups: int, heads: int, head_dim: int, state: int, kernel: int, drafts: int = 0
) -> Shapes:
    """Convolution and state of a Mamba-2 layer; groups that ranks do not divide are replicated to one a rank."""
    groups = groups if groups % ranks == 0 else ranks
    channels = _share("convolution channels", intermediate + 2 * groups * state, ranks)
    return (kernel - 1 + drafts, channels), (_share("state heads", heads, ranks), head_dim, state)


def gated_delta_net(
    ranks: int, *, key_heads: int, value_heads: int, key_dim: int, value_dim: int, kernel: int, drafts: int = 0
) -> Shapes:
    """Convolution and state of a gated delta net."""
    channels = _share("convolution channels", 2 * key_dim * key_heads + value_dim * value_heads, ranks)
    return (kernel - 1 + drafts, channels), (_share("value heads", value_heads, ranks), value_dim, key_dim)


def kimi_delta(ranks: int, *, heads: int, head_dim: int, kernel: int, drafts: int = 0) -> Shapes:
    """Convolution and state of Kimi delta attention."""
    channels = _share("convolution channels", 3 * heads * head_dim, ranks)
    return (kernel - 1 + drafts, channels), (_share("heads", heads, ranks), head_dim, head_dim)


def short_conv(ranks: int, *, channels: int, kernel: int, drafts: int = 0) -> Shapes:
    """State of a short convolution: nothing recurrent follows it."""
    return ((kernel - 1 + drafts, _share("convolution channels", channels, ranks)),)


def lightning(ranks: int, *, heads: int, head_dim: int) -> Shapes:
    """State of lightning (linear) attention: no convolution."""
    return ((_share("heads", heads, ranks), head_dim, head_dim),)


def _share(name: str, size: int, ranks: int) -> int:
    if size % ranks:
        raise ConfigError(name, size, f"a multiple of {ranks} tensor-parallel ranks")
    return size // ranks


def add_states(
    decoder: Decoder,
    index: int,
    kind_fields: tuple[str, ...],
    shape: Callable[..., Shapes],
    sizes: Mapping[str, Field],
    state: Typed | None,
    *,
    heads: tuple[str, ...] = (),
    checkpoint: int | None = None,
    part: str = "",
    on_grid: bool = True,
) -> None:
    """Adds a layer's states, of the sizes that their shape asks for; `state` types the one behind the convolution's."""
    shapes = shape(decoder.options.tensor_parallel, **{name: size.value for name, size in sizes.items()})
    dtypes = (decoder.dtype,) if state is None else (decoder.dtype, state)
    size_fields = tuple(name for size in sizes.values() for name in size.names)
    heads_fields = tuple(name for each in heads for name in sizes[each].names)
    decoder.state(index, kind_fields, shapes, dtypes, size_fields, heads_fields, checkpoint, part, on_grid)


def draft_tokens(decoder: Decoder) -> dict[str, Field]:
    """Tokens by which convolutions are longer, so that drafts can be taken back."""
    return {"drafts": Field(decoder.options.speculative_tokens, ())}


# Mamba alone, or with attention in between.


def _jamba(decoder: Decoder) -> Model:
    fields = decoder.fields
    count = fields.num_layers
    period, offset = fields.integer("attn_layer_period"), fields.count("attn_layer_offset")
    names = (*period.names, fields.place("attn_layer_offset"))
    sizes = {"intermediate": fields.integer("mamba_expand").times(fields.integer("hidden_size"))}
    for index in range(count):
        if index % period.value == offset:
            decoder.attention(index, FULL, names)
        else:
            sizes |= {"state": fields.integer("mamba_d_state"), "kernel": fields.integer("mamba_d_conv")}
            add_states(decoder, index, names, mamba1, sizes, decoder.state_dtype())
    return decoder.model(count)


def _mamba(decoder: Decoder, index: int) -> None:
    fields = decoder.fields
    expanded = fields.integer("expand").times(fields.integer("hidden_size"))
    sizes = {"intermediate": fields.optional("intermediate_size") or expanded}
    sizes |= {"state": fields.integer("state_size"), "kernel": fields.integer("conv_kernel")}
    add_states(decoder, index, (), mamba1, sizes, decoder.state_dtype())


# Mamba-2: alone, in between (Granite 4, Nemotron-H), beside attention (Falcon-H1), under it (Zamba2).


def _add_mamba2(
    decoder: Decoder, index: int, names: tuple[str, ...], sizes: Mapping[str, Field], part: str = "", *typed: str
) -> None:
    """Adds a Mamba-2 layer; `typed` names a field that may say the state's element type, and the default."""
    state = decoder.state_dtype(typed[0], default=typed[1]) if typed else decoder.state_dtype()
    sizes = {**sizes, **draft_tokens(decoder)}
    add_states(decoder, index, names, mamba2, sizes, state, heads=("heads",), checkpoint=ANY_TOKEN, part=part)


def _sizes(fields: Fields, intermediate: Field, heads: Field, head_dim: Field, rest: str) -> dict[str, Field]:
    """Sizes of a Mamba-2 layer; the rest are fields of its groups, its state and its kernel."""
    groups, state, kernel = map(fields.integer, rest.split())
    names = ("intermediate", "groups", "heads", "head_dim", "state", "kernel")
    return dict(zip(names, (intermediate, groups, heads, head_dim, state, kernel), strict=True))


def _mamba2_sizes(fields: Fields) -> dict[str, Field]:
    """Of the fields `mamba_expand`, `mamba_n_heads`, ... (Granite 4, Falcon-H1)."""
    intermediate = fields.integer("mamba_expand").times(fields.integer("hidden_size"))
    if "mamba_d_ssm" in fields.family.fields:
        intermediate = fields.optional("mamba_d_ssm") or intermediate
    heads = fields.integer("mamba_n_heads")
    automatic = fields.raw("mamba_d_head") == "auto"
    head_dim = intermediate.over(heads) if automatic else fields.integer("mamba_d_head")
    return _sizes(fields, intermediate, heads, head_dim, "mamba_n_groups mamba_d_state mamba_d_conv")


def _granite(decoder: Decoder) -> Model:
    """By `layer_types`; without it all layers are Mamba-2."""
    fields = decoder.fields
    layers = listed(fields, MAMBA_KINDS) or [(STATE, (fields.place("layer_types"),))] * fields.num_layers
    for index, (kind, names) in enumerate(layers):
        if kind == FULL:
            decoder.attention(index, kind, names, window=window_of(fields))
        else:
            _add_mamba2(decoder, index, names, _mamba2_sizes(fields))
    return decoder.model(fields.num_layers)


def _falcon_h1(decoder: Decoder, index: int) -> None:
    """Attention and Mamba-2 side by side in every layer."""
    decoder.attention(index, FULL, ())
    _add_mamba2(decoder, index, (), _mamba2_sizes(decoder.fields), "mixer")


LETTERS = {"M": STATE, "*": FULL, "-": "mlp", "E": "moe"}
"""Nemotron-H's kinds of layers in `hybrid_override_pattern`."""


def _nemotron_h(decoder: Decoder) -> Model:
    """Mamba-2, attention and feed-forward blocks, each a layer of its own; feed-forward has no cache."""
    fields = decoder.fields
    layers = _nemotron_h_kinds(fields)
    for index, (kind, name) in enumerate(layers):
        if kind == FULL:
            decoder.attention(index, kind, (name,))
        elif kind == STATE:
            heads, head_dim = fields.integer("mamba_num_heads"), fields.integer("mamba_head_dim")
            sizes = _sizes(fields, heads.times(head_dim), heads, head_dim, "n_groups ssm_state_size conv_kernel")
            _add_mamba2(decoder, index, (name,), sizes, "", "mamba_ssm_cache_dtype", "float32")
    return decoder.model(len(layers))


def _nemotron_h_kinds(fields: Fields) -> list[tuple[str, str]]:
    pattern, place = fields.raw("hybrid_override_pattern"), fields.place("hybrid_override_pattern")
    if pattern is None or fields.given("layers_block_type"):
        return fields.names("layers_block_type", NEMOTRON_KINDS) or []
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
        own = fields.integer("n_mamba_heads")
        sizes = _sizes(fields, intermediate, own, intermediate.over(own), "mamba_ngroups mamba_d_state mamba_d_conv")
        _add_mamba2(decoder, index, (), sizes)
    return decoder.model(len(kinds))


def _mamba2(decoder: Decoder, index: int) -> None:
    fields = decoder.fields
    expanded = fields.integer("expand").times(fields.integer("hidden_size"))
    intermediate = fields.optional("intermediate_size") or expanded
    heads, head_dim = fields.integer("num_heads"), fields.integer("head_dim")
    sizes = _sizes(fields, intermediate, heads, head_dim, "n_groups state_size conv_kernel")
    _add_mamba2(decoder, index, (), sizes)


# LFM2: short convolutions with attention in between.


def _lfm2(decoder: Decoder) -> Model:
    """Convolutions of `conv_dim` channels; of `hidden_size`, as in transformers, where a config has none."""
    fields = decoder.fields
    layers, kernel = _lfm2_kinds(fields), fields.integer("conv_L_cache")
    width = fields.optional("conv_dim") if "conv_dim" in fields.family.fields else None
    width = width or fields.derived("conv_dim", fields.integer("hidden_size"))
    for index, (kind, names) in enumerate(layers):
        if kind == FULL:
            decoder.attention(index, kind, names)
            continue
        sizes = {"channels": width, "kernel": kernel, **draft_tokens(decoder)}
        add_states(decoder, index, names, short_conv, sizes, None)
    return decoder.model(len(layers))


def _lfm2_kinds(fields: Fields) -> Kinds:
    """By `layer_types`, else by `full_attn_idxs`, without which every layer is full attention."""
    if (kinds := listed(fields, CONV_KINDS)) is not None:
        return kinds
    full = fields.integers("full_attn_idxs") if "full_attn_idxs" in fields.family.fields else None
    count = fields.num_layers
    if full is None:
        return [(FULL, (fields.place("layer_types"),))] * count
    attention = {index.value for index in full}
    return [(FULL if i in attention else CONV, (fields.place("full_attn_idxs"),)) for i in range(count)]


READERS: Mapping[str, Callable[[Decoder], Model]] = {
    "jamba": _jamba,
    "mamba": every_layer(_mamba),
    "granite": _granite,
    "falcon_h1": every_layer(_falcon_h1),
    "nemotron_h": _nemotron_h,
    "zamba2": _zamba2,
    "mamba2": every_layer(_mamba2),
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
}

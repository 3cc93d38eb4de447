"""Delta nets and lightning attention: Qwen3-Next and 3.5, OLMo Hybrid; beside latents, Kimi Linear and Ling."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hkv.errors import ConfigError
from hkv.model.huggingface.decoder import Decoder
from hkv.model.huggingface.families.attention import FULL, Kinds, listed
from hkv.model.huggingface.families.states import (
    STATE,
    add_states,
    draft_tokens,
    gated_delta_net,
    kimi_delta,
    lightning,
)
from hkv.model.huggingface.fields import Field, Fields
from hkv.model.huggingface.model import Model

DELTA_KINDS = {FULL: FULL, STATE: STATE, "indexed_attention": FULL}

FLASHINFER_GRID = 64
"""Tokens of which places of states inside a chunk are multiples (vLLM 0.33 `FLASHINFER_GDN_CHECKPOINT_ALIGNMENT`)."""

FLASHKDA_GRID = 16
"""The same of FlashKDA's states (vLLM 0.33 `kda_prefill_checkpoint_alignment`)."""

FLASHKDA_HEAD = 128
"""Channels of the only head that its kernels take."""


def _qwen(decoder: Decoder) -> Model:
    """By `layer_types`, else every so manieth layer is full attention."""
    fields = decoder.fields
    layers = listed(fields, DELTA_KINDS)
    if layers is None:
        interval = fields.integer("full_attention_interval")
        count = fields.num_layers
        layers = [(STATE if (i + 1) % interval.value else FULL, interval.names) for i in range(count)]
    named = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    sizes = [fields.integer(f"linear_{name}") for name in named]
    checkpoint = FLASHINFER_GRID if decoder.options.gdn_prefill == "flashinfer" else None
    typed = ("mamba_ssm_dtype",) if "mamba_ssm_dtype" in fields.family.fields else ()
    return _delta_nets(decoder, layers, sizes, typed, checkpoint)


def _olmo(decoder: Decoder) -> Model:
    """By `layer_types`, else every fourth layer is full attention, and at least the last."""
    fields = decoder.fields
    layers = listed(fields, DELTA_KINDS)
    if layers is None:
        count, place = fields.num_layers, (fields.place("layer_types"),)
        layers = [(FULL if i % 4 == 3 or (count < 4 and i == count - 1) else STATE, place) for i in range(count)]
    heads = fields.integer("num_attention_heads")
    key_heads = fields.optional("linear_num_key_heads") or heads
    value_heads = fields.optional("linear_num_value_heads") or heads
    hidden = fields.integer("hidden_size")
    key = fields.optional("linear_key_head_dim") or hidden.times(3).over(key_heads.times(4))
    value = fields.optional("linear_value_head_dim") or key.times(2)
    sizes = [key_heads, value_heads, key, value, fields.integer("linear_conv_kernel_dim")]
    return _delta_nets(decoder, layers, sizes)


def _delta_nets(
    decoder: Decoder, layers: Kinds, sizes: list[Field], typed: tuple[str, ...] = (), checkpoint: int | None = None
) -> Model:
    names = ("key_heads", "value_heads", "key_dim", "value_dim", "kernel")
    named = {**dict(zip(names, sizes, strict=True)), **draft_tokens(decoder)}
    for index, (kind, places) in enumerate(layers):
        if kind == FULL:
            decoder.attention(index, kind, places)
            continue
        state = decoder.state_dtype(*typed)
        add_states(decoder, index, places, gated_delta_net, named, state, heads=names[:2], checkpoint=checkpoint)
    return decoder.model(len(layers))


# Kimi delta attention and lightning attention with latents in between: Kimi Linear, Ling 2.5 and 3.

KIMI_PARTS = (
    "full_attn_layers",
    "kda_layers",
    "num_heads",
    "head_dim",
    "short_conv_kernel_size",
    "gate_lower_bound",
    "use_full_rank_gate",
)
"""Fields of `linear_attn_config`; the gate's bound decides whether a prompt's chunk leaves a state."""

LEAST_GATE = -5.0

LIGHTNING, DELTA = "BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM"
"""Architectures of Ling, both of one `model_type`."""


def _kimi(decoder: Decoder) -> Model:
    fields = decoder.fields
    nested, place = fields.nested("linear_attn_config"), fields.place("linear_attn_config")
    strange = sorted(nested.keys() - KIMI_PARTS)
    if strange:
        raise ConfigError(f"{place}.{strange[0]}", nested[strange[0]], f"one of {', '.join(KIMI_PARTS)}")
    layers = _kimi_kinds(fields)
    heads, head_dim, kernel = (
        fields.inside("linear_attn_config", inner) or fields.integer(name)
        for inner, name in (
            ("num_heads", "linear_num_heads"),
            ("head_dim", "linear_head_dim"),
            ("short_conv_kernel_size", "linear_conv_kernel_dim"),
        )
    )
    checkpoint = FLASHKDA_GRID if _bounded_gates(decoder, head_dim) else None
    for index, (kind, names) in enumerate(layers):
        if kind == FULL:
            decoder.latent(index, names)
        else:
            _add_kimi_delta(decoder, index, names, heads, head_dim, kernel, checkpoint)
    return decoder.model(len(layers))


def _kimi_kinds(fields: Fields) -> Kinds:
    """By `linear_attn_config`, which counts from 1, else by `layer_types`, else every fourth after the first."""
    count, nested = fields.num_layers, fields.nested("linear_attn_config")
    place = f"{fields.place('linear_attn_config')}.full_attn_layers"
    full = nested.get("full_attn_layers")
    if full is None:
        default: Kinds = [(FULL if i and i % 4 == 0 else STATE, (fields.place("layer_types"),)) for i in range(count)]
        return listed(fields, DELTA_KINDS) or default
    if not isinstance(full, list) or not all(type(layer) is int and 1 <= layer <= count for layer in full):
        raise ConfigError(place, full, f"a list of layers, counted from 1 to {count}")
    delta = nested.get("kda_layers", sorted(set(range(1, count + 1)) - set(full)))
    if not isinstance(delta, list) or sorted([*delta, *full], key=str) != sorted(range(1, count + 1), key=str):
        expected = "the layers that are not in full_attn_layers"
        raise ConfigError(f"{fields.place('linear_attn_config')}.kda_layers", delta, expected)
    return [(FULL if i + 1 in full else STATE, (place,)) for i in range(count)]


def _bounded_gates(decoder: Decoder, head_dim: Field) -> bool:
    """True if FlashKDA computes prompts: Kimi K3's own class, where gates are bounded (vLLM 0.33 `kimi_k3`)."""
    fields = decoder.fields
    bound = fields.nested("linear_attn_config").get("gate_lower_bound")
    if bound is None or fields.outer.get("model_type") != "kimi_k3":
        return False
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not LEAST_GATE <= bound < 0:
        place = f"{fields.place('linear_attn_config')}.gate_lower_bound"
        raise ConfigError(place, bound, f"null, or a bound from {LEAST_GATE} to 0, 0 excluded")
    states = decoder.state_dtype(default="float32")[0] in ("bfloat16", "float32")
    sizes = decoder.dtype[0] == "bfloat16" and head_dim.value == FLASHKDA_HEAD
    return decoder.options.kda_prefill == "flashkda" and states and sizes


def _add_kimi_delta(
    decoder: Decoder,
    index: int,
    names: tuple[str, ...],
    heads: Field,
    head_dim: Field,
    kernel: Field,
    checkpoint: int | None = None,
) -> None:
    """Adds a layer of Kimi delta attention; its recurrent state is float32 unless asked for otherwise."""
    sizes = {"heads": heads, "head_dim": head_dim, "kernel": kernel, **draft_tokens(decoder)}
    state = decoder.state_dtype(default="float32")
    add_states(decoder, index, names, kimi_delta, sizes, state, heads=("heads",), checkpoint=checkpoint, on_grid=False)


def _bailing(decoder: Decoder) -> Model:
    """The last layer of each group is latent; in Ling 3 those after the last whole group too (vLLM 0.33)."""
    fields = decoder.fields
    named = fields.raw("architectures")
    if not isinstance(named, list) or len(named) != 1 or named[0] not in (LIGHTNING, DELTA):
        raise ConfigError(fields.place("architectures"), named, f"[{LIGHTNING}] or [{DELTA}]")
    delta = named[0] == DELTA
    count, group = fields.num_layers, fields.integer("layer_group_size")
    whole = count // group.value * group.value if delta else count
    for index in range(count):
        if (index + 1) % group.value == 0 or index >= whole:
            decoder.latent(index, group.names)
            continue
        heads = fields.integer("num_attention_heads")
        if delta:
            kernel = fields.integer("short_conv_kernel_size")
            _add_kimi_delta(decoder, index, group.names, heads, fields.head_dim, kernel)
        else:
            sizes = {"heads": heads, "head_dim": fields.head_dim}
            add_states(decoder, index, group.names, lightning, sizes, None, heads=("heads",))
    return decoder.model(count)


READERS: Mapping[str, Callable[[Decoder], Model]] = {
    "qwen3_next": _qwen,
    "olmo_hybrid": _olmo,
    "kimi_linear": _kimi,
    "bailing": _bailing,
}

"""Delta nets with attention in between: Qwen3-Next and Qwen3.5, OLMo Hybrid, Kimi Linear."""

from __future__ import annotations

from hkv.errors import ConfigError
from hkv.model.huggingface.decoder import Decoder
from hkv.model.huggingface.families.latent import SIZES
from hkv.model.huggingface.family import Family, words
from hkv.model.huggingface.family_table import families
from hkv.model.huggingface.fields import Field, Fields
from hkv.model.huggingface.layer_kinds import FULL, Kinds
from hkv.model.huggingface.model import Model
from hkv.model.huggingface.state_shapes import gated_delta_net, kimi_delta

STATE = "linear_attention"
KNOWN = {FULL: FULL, STATE: STATE, "indexed_attention": FULL}

FLASHINFER_GRID = 64
"""Tokens of which places of states inside a chunk are multiples (vLLM 0.33 `FLASHINFER_GDN_CHECKPOINT_ALIGNMENT`)."""

SIZE_FIELDS = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


def _listed(fields: Fields) -> Kinds | None:
    listed = fields.names("layer_types", KNOWN)
    return None if listed is None else [(kind, (place,)) for kind, place in listed]


def _qwen(decoder: Decoder) -> Model:
    """By `layer_types`, else every so manieth layer is full attention."""
    fields = decoder.fields
    layers = _listed(fields)
    if layers is None:
        interval = fields.integer("full_attention_interval")
        count = fields.num_layers
        layers = [(STATE if (i + 1) % interval.value else FULL, interval.names) for i in range(count)]
    sizes = [fields.integer(name) for name in SIZE_FIELDS]
    checkpoint = FLASHINFER_GRID if decoder.options.gdn_prefill == "flashinfer" else None
    for index, (kind, names) in enumerate(layers):
        if kind == FULL:
            decoder.attention(index, kind, names)
        else:
            _add_delta_net(decoder, index, names, sizes, decoder.state_dtype(*_state_field(fields)), checkpoint)
    return decoder.model(len(layers))


def _state_field(fields: Fields) -> tuple[str, ...]:
    return ("mamba_ssm_dtype",) if "mamba_ssm_dtype" in fields.family.fields else ()


def _olmo(decoder: Decoder) -> Model:
    """By `layer_types`, else every fourth layer is full attention, and at least the last."""
    fields = decoder.fields
    layers = _listed(fields)
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
    for index, (kind, names) in enumerate(layers):
        if kind == FULL:
            decoder.attention(index, kind, names)
        else:
            _add_delta_net(decoder, index, names, sizes, decoder.state_dtype(), None)
    return decoder.model(len(layers))


def _add_delta_net(
    decoder: Decoder,
    index: int,
    kind_fields: tuple[str, ...],
    sizes: list[Field],
    state_dtype: tuple[str, tuple[str, ...]],
    checkpoint: int | None,
) -> None:
    key_heads, value_heads, key, value, kernel = sizes
    shapes = gated_delta_net(
        decoder.options.tensor_parallel,
        key_heads=key_heads.value,
        value_heads=value_heads.value,
        key_dim=key.value,
        value_dim=value.value,
        kernel=kernel.value,
        drafts=decoder.options.speculative_tokens,
    )
    names = tuple(name for size in sizes for name in size.names)
    heads = (*key_heads.names, *value_heads.names)
    decoder.state(index, kind_fields, shapes, (decoder.dtype, state_dtype), names, heads, checkpoint)


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
FLASHKDA_GRID = 16
"""Tokens of which the places of FlashKDA's states are multiples (vLLM 0.33 `kda_prefill_checkpoint_alignment`)."""

FLASHKDA_HEAD = 128
"""Channels of the only head that its kernels take."""


def _kimi(decoder: Decoder) -> Model:
    """Kimi delta attention with latent attention in between."""
    fields = decoder.fields
    strange = sorted(fields.nested("linear_attn_config").keys() - KIMI_PARTS)
    if strange:
        place = f"{fields.place('linear_attn_config')}.{strange[0]}"
        raise ConfigError(place, fields.nested("linear_attn_config")[strange[0]], f"one of {', '.join(KIMI_PARTS)}")
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
            continue
        add_kimi_delta(decoder, index, names, heads, head_dim, kernel, checkpoint)
    return decoder.model(len(layers))


def _bounded_gates(decoder: Decoder, head_dim: Field) -> bool:
    """True if FlashKDA computes prompts: Kimi K3's own class, where gates are bounded (vLLM 0.33 `kimi_k3`).

    Raises:
      ConfigError: a bound that the kernels do not take.
    """
    fields = decoder.fields
    bound = fields.nested("linear_attn_config").get("gate_lower_bound")
    if bound is None or fields.outer.get("model_type") != "kimi_k3":
        return False
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not LEAST_GATE <= bound < 0:
        place = f"{fields.place('linear_attn_config')}.gate_lower_bound"
        raise ConfigError(place, bound, f"null, or a bound from {LEAST_GATE} to 0, 0 excluded")
    states = decoder.state_dtype(default="float32")[0] in ("bfloat16", "float32")
    return (
        decoder.options.kda_prefill == "flashkda"
        and states
        and decoder.dtype[0] == "bfloat16"
        and head_dim.value == FLASHKDA_HEAD
    )


def add_kimi_delta(
    decoder: Decoder,
    index: int,
    names: tuple[str, ...],
    heads: Field,
    head_dim: Field,
    kernel: Field,
    checkpoint: int | None = None,
) -> None:
    """Adds a layer of Kimi delta attention; its recurrent state is float32 unless asked for otherwise.

    Args:
      decoder: the model so far.
      index: of the layer.
      names: fields that say what kind of layer it is.
      heads: of the state.
      head_dim: channels of a head.
      kernel: taps of the convolution.
      checkpoint: tokens of which the places of states inside a prompt's chunk are multiples, or None for no such state.
    """
    shapes = kimi_delta(
        decoder.options.tensor_parallel,
        heads=heads.value,
        head_dim=head_dim.value,
        kernel=kernel.value,
        drafts=decoder.options.speculative_tokens,
    )
    dtypes = (decoder.dtype, decoder.state_dtype(default="float32"))
    sizes = (*heads.names, *head_dim.names, *kernel.names)
    decoder.state(index, names, shapes, dtypes, sizes, heads.names, checkpoint, on_grid=False)


def _kimi_kinds(fields: Fields) -> Kinds:
    """By `linear_attn_config`, which counts from 1, else by `layer_types`, else every fourth after the first.

    Raises:
      ConfigError: a layer is in both lists of `linear_attn_config` or in none.
    """
    count = fields.num_layers
    nested = fields.nested("linear_attn_config")
    place = f"{fields.place('linear_attn_config')}.full_attn_layers"
    full = nested.get("full_attn_layers")
    if full is None:
        default: Kinds = [(FULL if i and i % 4 == 0 else STATE, (fields.place("layer_types"),)) for i in range(count)]
        return _listed(fields) or default
    if not isinstance(full, list) or not all(type(layer) is int and 1 <= layer <= count for layer in full):
        raise ConfigError(place, full, f"a list of layers, counted from 1 to {count}")
    delta = nested.get("kda_layers", sorted(set(range(1, count + 1)) - set(full)))
    if not isinstance(delta, list) or sorted([*delta, *full], key=str) != sorted(range(1, count + 1), key=str):
        expected = "the layers that are not in full_attn_layers"
        raise ConfigError(f"{fields.place('linear_attn_config')}.kda_layers", delta, expected)
    return [(FULL if i + 1 in full else STATE, (place,)) for i in range(count)]


HEADING = "model_type hidden layers heads kv_heads head_dim longest " + " ".join(SIZE_FIELDS)

NEXT = """
qwen3_next       2048 48 16 2 256 32768 16 32 128 128 4 Qwen3-Next
"""
QWEN3_5 = """
qwen3_5_text     4096 32 16 4 256 32768 16 32 128 128 4 Qwen3.5
qwen3_5_moe_text 2048 40 16 2 256 32768 16 32 128 128 4 Qwen3.5 MoE
"""
QWEN4 = """
qwen4_exp_text   2048 40 16 2 256 32768 16 32 128 128 4 Qwen4
"""
LAYERS = {"layer_types": None, "full_attention_interval": 4}

FAMILIES = {
    **families(HEADING + NEXT, _qwen, more=LAYERS),
    **families(HEADING + QWEN3_5, _qwen, more={**LAYERS, "mamba_ssm_dtype": None}),
    **families(
        HEADING + QWEN4,
        _qwen,
        more={**LAYERS, "mamba_ssm_dtype": None},
        inert="""ple_embed_dim ple_conv_kernel_size ngram_size heads_per_ngram ngram_vocab_size_base seed hc_count
        hc_lowrank make_ngram_vocab_size_divisible_by split_ngram_parts output_gate_type""",
        only={"ple_layer_ids": []},
    ),
    "olmo_hybrid": Family(
        "OLMo Hybrid",
        _olmo,
        {
            "hidden_size": 3840,
            "num_hidden_layers": 32,
            "num_attention_heads": 30,
            "num_key_value_heads": None,
            "max_position_embeddings": 65536,
            "layer_types": None,
            "linear_num_key_heads": None,
            "linear_num_value_heads": None,
            "linear_key_head_dim": None,
            "linear_value_head_dim": None,
            "linear_conv_kernel_dim": 4,
        },
    ),
    # vLLM 0.33 reads these files by a config class of its own, whose longest request is not that of transformers
    "kimi_linear": Family(
        "Kimi Linear",
        _kimi,
        {
            "num_hidden_layers": 32,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "max_position_embeddings": 4096,
            "layer_types": None,
            "linear_attn_config": None,
            "linear_head_dim": 128,
            "linear_num_heads": 32,
            "linear_conv_kernel_dim": 4,
        },
        (SIZES - {"layer_types"})
        | words(
            """num_expert_group num_expert_token moe_renormalize num_shared_experts mla_use_nope mla_use_output_gate
            moe_router_activation_func use_grouped_topk"""
        ),
    ),
}

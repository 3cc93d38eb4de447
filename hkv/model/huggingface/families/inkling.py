"""Inkling: full attention and windows, each layer beside a cache of the tokens that its short convolutions read."""

from __future__ import annotations

from hkv.errors import ConfigError
from hkv.model.huggingface.decoder import Decoder, layer_name
from hkv.model.huggingface.family import REQUIRED, Family, words
from hkv.model.huggingface.fields import Field, Fields
from hkv.model.huggingface.layer_kinds import FULL, SLIDING
from hkv.model.huggingface.model import CacheLayer, Model
from hkv.spec import SlidingWindow

KERNEL = Field(4, ())
"""Tokens that a convolution reads where the file does not say (vLLM 0.33 `InklingModelConfig`)."""

ELEMENTS = "bfloat16"
"""Element type that vLLM 0.33's kernels for the convolutions take."""


def _read(decoder: Decoder) -> Model:
    """Windows in `local_layer_ids`, with heads of their own (vLLM 0.33 `InklingDecoderLayer`)."""
    fields, count = decoder.fields, decoder.fields.num_layers
    if decoder.dtype[0] != ELEMENTS:
        raise ConfigError(fields.place("dtype"), decoder.dtype[0], f"{ELEMENTS}: the convolutions take no other")
    if decoder.options.kv_dtype not in ("auto", ELEMENTS):
        raise ConfigError("kv_dtype", decoder.options.kv_dtype, f"auto: the convolutions' cache is {ELEMENTS}")
    local = {each.value for each in fields.integers("local_layer_ids") or ()}
    if local and max(local) >= count:
        raise ConfigError(fields.place("local_layer_ids"), max(local), f"layers below {count}")
    _check_types(fields, local)
    window, names = fields.integer("sliding_window_size"), (fields.place("local_layer_ids"),)
    for index in range(count):
        windowed = index in local
        heads, size = fields.kv_heads, fields.head_dim
        if windowed:
            heads = fields.optional("swa_num_key_value_heads") or fields.derived("swa_num_key_value_heads", heads)
            size = fields.optional("swa_head_dim") or fields.derived("swa_head_dim", size)
        _add_convolutions(decoder, index, names, heads, size)
        kind = SLIDING if windowed else FULL
        decoder.attention(index, kind, names, heads=heads, head_dim=size, window=window if windowed else None)
    return decoder.model(count)


def _check_types(fields: Fields, local: set[int]) -> None:
    """Makes sure that `layer_types`, which vLLM 0.33 does not read, says the same as `local_layer_ids`.

    Raises:
      ConfigError: it does not.
    """
    for index, (kind, place) in enumerate(fields.names("layer_types") or ()):
        expected = "hybrid_sliding" if index in local else "hybrid"
        if kind != expected:
            raise ConfigError(place, kind, f"{expected}, as local_layer_ids says, which is what vLLM reads")


def _add_convolutions(decoder: Decoder, index: int, names: tuple[str, ...], heads: Field, size: Field) -> None:
    """Adds the inputs of a layer's four convolutions: of keys, of values, behind the attention and behind the MLP.

    They lie side by side, a head's share each, rounded up to a power of two (vLLM 0.33 `InklingConvState`).
    """
    fields, ranks = decoder.fields, decoder.options.tensor_parallel
    if heads.value % ranks:
        raise ConfigError(" x ".join(heads.names), heads.value, f"a multiple of {ranks} tensor-parallel ranks")
    kernel = fields.optional("sconv_kernel_size") or fields.optional("conv_kernel_size") or KERNEL
    hidden = fields.integer("hidden_size")
    width = 2 * size.value + 2 * (hidden.value // heads.value)
    spec = SlidingWindow(
        block_size=kernel.value,
        num_kv_heads=heads.value // ranks,
        head_size=1 << (width - 1).bit_length(),
        head_size_v=0,
        dtype=ELEMENTS,
        window=kernel.value,
        cp_sharded=True,
        is_draft=decoder.options.draft,
    )
    sizes = (*size.names, *hidden.names)
    origin = {"kind": names, "heads": heads.names, "size": sizes, "window": kernel.names}
    decoder.layers.append(CacheLayer(layer_name(index, "conv_state"), index, spec, origin))


INKLING = Family(
    "Inkling",
    _read,
    {
        "hidden_size": REQUIRED,
        "num_hidden_layers": REQUIRED,
        "num_attention_heads": REQUIRED,
        "num_key_value_heads": REQUIRED,
        "head_dim": None,
        "local_layer_ids": None,
        "layer_types": None,
        "sliding_window_size": 512,
        "swa_num_key_value_heads": None,
        "swa_head_dim": None,
        "sconv_kernel_size": None,
        "conv_kernel_size": None,
        "max_position_embeddings": None,
    },
    words(
        """
        chain_hidden_post_norm d_rel dense_intermediate_size dense_mlp_idx gate_activation
        inference_moe_w13_interleaved log_scaling_alpha log_scaling_n_floor logits_mup_width_multiplier
        mtp_hidden_states_first mtp_local_layer_ids norm_after_topk number_of_conv_states o_bias padded_vocab_size
        q_bias rel_extent rms_norm_eps_moe_gate shared_expert_sink shared_experts_size swa_num_attention_heads
        swa_v_head_dim unpadded_vocab_size use_embed_norm use_gate_bias use_global_scale v_head_dim
        """
    ),
    only={"use_sconv": True},
)

FAMILIES = {"inkling_text": INKLING, "inkling_model": INKLING}

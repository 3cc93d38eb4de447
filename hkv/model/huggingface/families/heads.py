"""Keys and values whose heads or layers a family counts in a way of its own: Falcon, StarCoder, DeciLM, Inkling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hkv.errors import ConfigError
from hkv.limits import MAX_TOKENS, check_whole
from hkv.model.huggingface.decoder import Decoder, every_layer, layer_name
from hkv.model.huggingface.families.attention import FULL, SLIDING
from hkv.model.huggingface.fields import Field, Fields
from hkv.model.huggingface.model import CacheLayer, Model
from hkv.spec import SlidingWindow


def alike(heads: Callable[[Fields], Field], **layer: Any) -> Callable[[Decoder], Model]:
    """A reader of full attention in every layer."""
    return every_layer(lambda decoder, index: decoder.attention(index, FULL, (), heads=heads(decoder.fields), **layer))


def _falcon(fields: Fields) -> Field:
    """One head with `multi_query`, unless `new_decoder_architecture` counts them (vLLM 0.33 `FalconAttention`)."""
    names = (fields.place("multi_query"), fields.place("new_decoder_architecture"))
    if fields.flag("new_decoder_architecture"):
        heads = fields.optional("num_kv_heads") or fields.integer("num_attention_heads")
    else:
        heads = Field(1, ()) if fields.flag("multi_query") else fields.integer("num_attention_heads")
    return Field(heads.value, (*heads.names, *names))


def _starcoder(fields: Fields) -> Field:
    heads = Field(1, ()) if fields.flag("multi_query") else fields.integer("num_attention_heads")
    return Field(heads.value, (*heads.names, fields.place("multi_query")))


def _chatglm(fields: Fields) -> Field:
    several = fields.flag("multi_query_attention")
    heads = fields.integer("multi_query_group_num" if several else "num_attention_heads")
    return Field(heads.value, (*heads.names, fields.place("multi_query_attention")))


def _dbrx(fields: Fields) -> Field:
    return fields.inside("attn_config", "kv_n_heads") or Field(1, (f"{fields.place('attn_config')}.kv_n_heads",))


def _zaya(decoder: Decoder) -> Model:
    """Keys after convolutions (vLLM 0.33 `TransformersMoEForCausalLM`), of which the backend keeps nothing."""
    told = "vLLM 0.33 plans keys and values alone, without states of convolutions or delayed values"
    decoder.fields.notes["zaya"] = told
    return every_layer(lambda decoder, index: decoder.attention(index, FULL, ()))(decoder)


def _minicpm3(decoder: Decoder) -> Model:
    """Latents expanded to keys and values of full size, values padded to a key's (vLLM 0.33 `MiniCPM3Attention`)."""
    fields = decoder.fields
    size = fields.integer("qk_nope_head_dim").plus(fields.integer("qk_rope_head_dim"))
    return alike(lambda fields: fields.integer("num_attention_heads"), head_dim=size)(decoder)


def _hrm(decoder: Decoder) -> Model:
    """Two stacks run in cycles, each run of a layer with a cache of its own (transformers `HrmTextConfig`)."""
    fields = decoder.fields
    runs = fields.integer("num_hidden_layers")
    if fields.raw("num_layers_per_stack") is None:
        names = (fields.place("H_cycles"), fields.place("L_cycles"))
        runs = runs.times(Field(fields.integer("H_cycles").value * (fields.integer("L_cycles").value + 1), names))
    for index in range(runs.value):
        decoder.attention(index, FULL, (), causal=False)
    return decoder.model(runs.value)


UNUSED = {"window_length": None, "num_sink_tokens": None, "sparsify": None, "replace_with_linear": False}
"""Parts of a layer's attention in Llama-Nemotron that vLLM 0.33 does not read, at the value that asks for nothing."""

SWITCHES = ("unshifted_sink", "use_prefill_window_in_sink_attention")


def _nemotron_nas(decoder: Decoder) -> Model:
    """Llama-Nemotron (DeciLM): each layer's own number of key/value heads, or no attention."""
    fields = decoder.fields
    count, blocks, place = fields.num_layers, fields.raw("block_configs"), fields.place("block_configs")
    if not isinstance(blocks, list) or len(blocks) != count:
        raise ConfigError(place, blocks, f"a list of {count} blocks, one a layer")
    for index, block in enumerate(blocks):
        where = f"{place}[{index}].attention"
        found = block.get("attention") if isinstance(block, Mapping) else None
        if not isinstance(found, Mapping):
            raise ConfigError(where, found, "an object")
        heads = _nemotron_nas_heads(fields, found, where)
        if heads is not None:
            decoder.attention(index, FULL, (f"{where}.no_op",), heads=heads)
    return decoder.model(count)


def _nemotron_nas_heads(fields: Fields, found: Mapping[str, Any], place: str) -> Field | None:
    """Key/value heads, or None for a layer without attention."""
    for name, value in found.items():
        if name in UNUSED and value != UNUSED[name]:
            raise ConfigError(f"{place}.{name}", value, f"{UNUSED[name]}")
        if name not in ("n_heads_in_group", "no_op", *UNUSED, *SWITCHES):
            raise ConfigError(f"{place}.{name}", value, "n_heads_in_group, no_op or a part of DeciLM's attention")
    if found.get("no_op"):
        return None
    group = found.get("n_heads_in_group")
    check_whole(f"{place}.n_heads_in_group", group, 1, MAX_TOKENS)
    return fields.integer("num_attention_heads").over(Field(int(group or 1), (f"{place}.n_heads_in_group",)))


# Inkling: each layer next to a cache of the tokens that its short convolutions read.

KERNEL = Field(4, ())
"""Tokens that a convolution reads where the file does not say (vLLM 0.33 `InklingModelConfig`)."""

ELEMENTS = "bfloat16"
"""Element type that vLLM 0.33's kernels for the convolutions take."""


def _inkling(decoder: Decoder) -> Model:
    """Windows in `local_layer_ids`, with heads of their own (vLLM 0.33 `InklingDecoderLayer`)."""
    fields, count = decoder.fields, decoder.fields.num_layers
    if decoder.dtype[0] != ELEMENTS:
        raise ConfigError(fields.place("dtype"), decoder.dtype[0], f"{ELEMENTS}: the convolutions take no other")
    if decoder.options.kv_dtype not in ("auto", ELEMENTS):
        raise ConfigError("kv_dtype", decoder.options.kv_dtype, f"auto: the convolutions' cache is {ELEMENTS}")
    local = {each.value for each in fields.integers("local_layer_ids") or ()}
    if local and max(local) >= count:
        raise ConfigError(fields.place("local_layer_ids"), max(local), f"layers below {count}")
    for index, (kind, place) in enumerate(fields.names("layer_types") or ()):
        expected = "hybrid_sliding" if index in local else "hybrid"
        if kind != expected:
            raise ConfigError(place, kind, f"{expected}, as local_layer_ids says, which is what vLLM reads")
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


READERS: Mapping[str, Callable[[Decoder], Model]] = {
    "falcon": alike(_falcon),
    "starcoder": alike(_starcoder),
    "chatglm": alike(_chatglm),
    "dbrx": alike(_dbrx),
    "jetmoe": alike(lambda fields: fields.integer("num_key_value_heads")),
    "step3": alike(lambda fields: fields.integer("num_attention_groups")),
    "zaya": _zaya,
    "minicpm3": _minicpm3,
    "hrm": _hrm,
    "nemotron_nas": _nemotron_nas,
    "inkling": _inkling,
}

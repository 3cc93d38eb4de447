"""Models that count heads or layers in ways of their own: Falcon, StarCoder, ChatGLM, DBRX, JetMoE, HRM-Text."""

from __future__ import annotations

from hkv.model.huggingface.decoder import Decoder
from hkv.model.huggingface.family import Family, words
from hkv.model.huggingface.fields import Field
from hkv.model.huggingface.layer_kinds import FULL
from hkv.model.huggingface.model import Model


def _plain(decoder: Decoder, heads: Field) -> Model:
    count = decoder.fields.num_layers
    for index in range(count):
        decoder.attention(index, FULL, (), heads=heads)
    return decoder.model(count)


def _falcon(decoder: Decoder) -> Model:
    """One head with `multi_query`, unless `new_decoder_architecture` counts them (vLLM 0.33 `FalconAttention`)."""
    fields = decoder.fields
    names = (fields.place("multi_query"), fields.place("new_decoder_architecture"))
    if fields.flag("new_decoder_architecture"):
        heads = fields.optional("num_kv_heads") or fields.integer("num_attention_heads")
    else:
        heads = Field(1, ()) if fields.flag("multi_query") else fields.integer("num_attention_heads")
    return _plain(decoder, Field(heads.value, (*heads.names, *names)))


def _starcoder(decoder: Decoder) -> Model:
    fields = decoder.fields
    heads = Field(1, ()) if fields.flag("multi_query") else fields.integer("num_attention_heads")
    return _plain(decoder, Field(heads.value, (*heads.names, fields.place("multi_query"))))


def _chatglm(decoder: Decoder) -> Model:
    fields = decoder.fields
    several = fields.flag("multi_query_attention")
    heads = fields.integer("multi_query_group_num" if several else "num_attention_heads")
    return _plain(decoder, Field(heads.value, (*heads.names, fields.place("multi_query_attention"))))


def _dbrx(decoder: Decoder) -> Model:
    fields = decoder.fields
    heads = fields.inside("attn_config", "kv_n_heads") or Field(1, (f"{fields.place('attn_config')}.kv_n_heads",))
    return _plain(decoder, heads)


def _jetmoe(decoder: Decoder) -> Model:
    return _plain(decoder, decoder.fields.integer("num_key_value_heads"))


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


FALCON_INERT = words(
    """num_ln_in_parallel_attn alibi parallel_attn bias ffn_hidden_size activation multi_query_group_num
    apply_residual_connection_post_layernorm"""
)
FALCON_NAMES = {
    "n_embed": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_head_kv": "num_kv_heads",
}

FAMILIES = {
    "falcon": Family(
        "Falcon",
        _falcon,
        {
            "hidden_size": 4544,
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "num_kv_heads": None,
            "multi_query": True,
            "new_decoder_architecture": False,
            "max_position_embeddings": 2048,
        },
        FALCON_INERT,
        spellings=FALCON_NAMES,
    ),
    "gpt_bigcode": Family(
        "StarCoder",
        _starcoder,
        {
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "multi_query": True,
            "max_position_embeddings": 1024,
        },
        words(
            """num_key_value_heads inference_runner max_batch_size max_sequence_length pad_key_length
            pre_allocate_kv_cache"""
        ),
        spellings={
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings",
        },
    ),
    "chatglm": Family(
        "ChatGLM",
        _chatglm,
        {
            "hidden_size": 4096,
            "num_hidden_layers": 28,
            "num_attention_heads": 32,
            "multi_query_attention": False,
            "multi_query_group_num": 1,
            "seq_length": 2048,
        },
        words(
            """padded_vocab_size ffn_hidden_size kv_channels rmsnorm post_layer_norm add_bias_linear add_qkv_bias
            interleaved_qkv bias_dropout_fusion apply_query_key_layer_scaling attention_softmax_in_fp32
            fp32_residual_connection quantization_bit pre_seq_len prefix_projection original_rope rope_ratio
            apply_residual_connection_post_layernorm"""
        ),
        spellings={"num_layers": "num_hidden_layers"},
    ),
    "hrm_text": Family(
        "HRM-Text",
        _hrm,
        {
            "hidden_size": 1536,
            "num_hidden_layers": 16,
            "num_attention_heads": 12,
            "head_dim": 128,
            "num_layers_per_stack": None,
            "H_cycles": 2,
            "L_cycles": 3,
            "max_position_embeddings": 2048,
        },
        words("num_key_value_heads L_bp_cycles embedding_scale prefix_lm"),
    ),
    "jetmoe": Family(
        "JetMoE",
        _jetmoe,
        {"num_hidden_layers": 12, "num_key_value_heads": 16, "head_dim": 128, "max_position_embeddings": 4096},
        words("hidden_size num_attention_heads"),
        spellings={"kv_channels": "head_dim"},
    ),
    "dbrx": Family(
        "DBRX",
        _dbrx,
        {
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "attn_config": None,
            "max_seq_len": 2048,
        },
        words("ffn_config emb_pdrop resid_pdrop num_key_value_heads"),
        spellings={
            "d_model": "hidden_size",
            "n_layers": "num_hidden_layers",
            "n_heads": "num_attention_heads",
            "max_position_embeddings": "max_seq_len",
        },
    ),
}

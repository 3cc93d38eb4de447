"""Multi-head latent attention: DeepSeek-V3 and its kin, LongCat with two of them in a layer; and MiniCPM3."""

from __future__ import annotations

from hkv.model.huggingface.decoder import Decoder
from hkv.model.huggingface.family import Family, words
from hkv.model.huggingface.family_table import families
from hkv.model.huggingface.model import Model


def _latent(decoder: Decoder) -> Model:
    count = decoder.fields.num_layers
    for index in range(count):
        decoder.latent(index)
    return decoder.model(count)


def _longcat(decoder: Decoder) -> Model:
    """Two attentions a decoder layer, each with a cache (vLLM 0.33 `FlashDecoderLayer`)."""
    count = decoder.fields.integer("num_layers")
    for index in range(count.value):
        for part in range(2):
            decoder.latent(index, part=f"self_attn.{part}")
    return decoder.model(count.value)


def _expanded(decoder: Decoder) -> Model:
    """Keys and values of full size, values padded to a key's (vLLM 0.33 `MiniCPM3Attention`)."""
    fields = decoder.fields
    size = fields.integer("qk_nope_head_dim").plus(fields.integer("qk_rope_head_dim"))
    count = fields.num_layers
    for index in range(count):
        decoder.attention(index, "full_attention", (), heads=fields.integer("num_attention_heads"), head_dim=size)
    return decoder.model(count)


TABLE = """
model_type        layers kv_lora_rank qk_rope_head_dim longest
deepseek_v2       32 512 64 2048   DeepSeek-V2
deepseek_v3       61 512 64 4096   DeepSeek-V3
kimi_k2           61 512 64 4096   Kimi K2
glm4_moe_lite     47 512 64 202752 GLM-4.7-Flash
axk1              61 512 64 32768  A.X K1
mistral4          36 256 64 1048576 Mistral 4
youtu             32 512 64 131072 Youtu
"""
"""Models of vLLM 0.33's own classes; Youtu is served through transformers, whose backend recognises latents."""

SIZES = words(
    "hidden_size num_attention_heads num_key_value_heads head_dim v_head_dim qk_nope_head_dim qk_head_dim layer_types"
)
"""Sizes of queries and values, which are not cached."""

EXPANDED = {
    "num_hidden_layers": 62,
    "num_attention_heads": 40,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "max_position_embeddings": 32768,
}

FAMILIES = {
    **families(TABLE, _latent, inert={name: " ".join(sorted(SIZES)) for name in TABLE.split()}),
    "longcat_flash": Family(
        "LongCat-Flash",
        _longcat,
        {"num_layers": 28, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "max_position_embeddings": 131072},
        SIZES
        | words("num_hidden_layers zero_expert_type zero_expert_num mla_scale_q_lora mla_scale_kv_lora router_bias"),
    ),
    "minicpm3": Family(
        "MiniCPM3",
        _expanded,
        EXPANDED,
        words("hidden_size num_key_value_heads head_dim v_head_dim kv_lora_rank scale_emb scale_depth dim_model_base"),
    ),
}

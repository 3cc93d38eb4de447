"""Weights of decoders by family, as vLLM 0.33's classes hold them: transformers, dense and with experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from hkv.dialects.vllm.weights.blocks import attention, experts, latent_attention, mlp
from hkv.dialects.vllm.weights.rank import Rank

FLOAT32 = 4
"""Bytes of an element of routers and correction biases that are kept in it."""

ALL = "embedding norm head"
"""All that is before and after the layers, on every pipeline stage: classes that do not ask which stage they are on."""


@dataclasses.dataclass(frozen=True)
class Weights:
    """Bytes of a model's parameters on one tensor-parallel rank, by the pipeline stages that hold them.

    Attributes:
      embedding: of tokens; on the first stage, and on the last one where the head is the same.
      layers: each decoder layer.
      norm: after the layers; on the last stage.
      head: 0 where it is the embedding; on the last stage.
      tied: the head is the embedding.
      spread: which of `embedding`, `norm` and `head` every stage holds.
      every: what every stage holds beside.
      encoders: of images and sound, and what joins them to the decoder; on the first stage.
    """

    embedding: int
    layers: tuple[int, ...]
    norm: int
    head: int
    tied: bool
    spread: str = ""
    every: int = 0
    encoders: int = 0

    def stages(self, bounds: list[tuple[int, int]]) -> tuple[int, ...]:
        """Bytes of each stage, by its first layer and the one after its last."""
        found = []
        for stage, (first, end) in enumerate(bounds):
            closes = stage == len(bounds) - 1
            total = sum(self.layers[first:end]) + self.every
            total += self.embedding * (stage == 0 or (self.tied and closes) or "embedding" in self.spread)
            total += self.encoders * (stage == 0) + self.norm * (closes or "norm" in self.spread)
            found.append(total + self.head * (closes or "head" in self.spread))
        return tuple(found)


def decoder(
    rank: Rank,
    layer: Callable[[int], int],
    *,
    tied: bool = False,
    spread: str = "",
    norms: int = 1,
    head_bias: bool = False,
    vocabulary: int | None = None,
    count: int | None = None,
) -> Weights:
    """A decoder: embedding, layers of so many bytes each, a norm (2 vectors with a bias) and a head.

    It is the embedding if it is `tied`, where the file does not say. `spread` names parts that every stage holds.
    """
    rows, size = rank.number("vocab_size", default=vocabulary), rank.hidden
    shared = bool(rank.value("tie_word_embeddings", tied))
    head = 0 if shared else rank.vocabulary(rows, size, head_bias)
    layers = tuple(layer(index) for index in range(rank.fields.num_layers if count is None else count))
    norm = rank.vector(*[size] * norms)
    return Weights(rank.vocabulary(rows, size), layers, norm, head, shared, spread)


@dataclasses.dataclass(frozen=True)
class Dense:
    """A family whose layers are all alike.

    Attributes:
      norms: vectors of a layer's norms; 4 with norms after attention and MLP too, 2 of each with biases.
      bias: default of a bias of queries, keys and values; the field says where it is named.
      bias_field: the field, or none.
      out_bias: the projection out has a bias: a field's name, or whether.
      mlp_bias: likewise of the MLP.
      norm: norms of queries and keys, as `attention` has them, or a field that asks for them.
      gated: MLPs have a gate.
      tied: the head is the embedding where the file does not say.
      spread: which of `embedding`, `norm` and `head` every pipeline stage holds.
      last: vectors of the last norm.
      head_bias: the head has a bias.
      vocabulary: tokens where published files leave the class's default out.
    """

    norms: int = 2
    bias: bool = False
    bias_field: str = ""
    out_bias: str | bool = False
    mlp_bias: str | bool = False
    norm: str = ""
    gated: bool = True
    tied: bool = False
    spread: str = ""
    last: int = 1
    head_bias: bool = False
    vocabulary: int | None = None

    def __call__(self, rank: Rank, prefix: str) -> Weights:
        def flag(chosen: str | bool) -> bool:
            return bool(rank.value(chosen, False)) if isinstance(chosen, str) else chosen

        bias = bool(rank.value(self.bias_field, self.bias)) if self.bias_field else self.bias
        inner = rank.number("intermediate_size")

        def layer(index: int) -> int:
            name = f"{prefix}layers.{index}"
            total = attention(rank, f"{name}.self_attn", bias=bias, out_bias=flag(self.out_bias), norm=self.norm)
            total += mlp(rank, f"{name}.mlp", inner, gated=self.gated, bias=flag(self.mlp_bias))
            return total + rank.vector(*[rank.hidden] * self.norms)

        return decoder(
            rank,
            layer,
            tied=self.tied,
            spread=self.spread,
            norms=self.last,
            head_bias=self.head_bias,
            vocabulary=self.vocabulary,
        )


def cohere(rank: Rank, prefix: str) -> Weights:
    """One norm a layer for attention and MLP side by side."""
    norm = "rank" if rank.value("use_qk_norm", False) else ""
    return Dense(
        norms=1, bias_field="attention_bias", out_bias="attention_bias", norm=norm, tied=True, spread="embedding norm"
    )(rank, prefix)


def latent_dense(rank: Rank, prefix: str) -> Weights:
    """MiniCPM3: latent attention before MLPs."""

    def layer(index: int) -> int:
        name = f"{prefix}layers.{index}"
        size = rank.number("qk_nope_head_dim") + rank.number("qk_rope_head_dim")
        heads, latent = rank.number("num_attention_heads"), rank.number("kv_lora_rank")
        values = rank.number("v_head_dim", default=rank.hidden // heads)
        query = rank.number("q_lora_rank")
        total = rank.whole(f"{name}.self_attn.q_a_proj", rank.hidden, query) + rank.vector(query)
        total += rank.column(f"{name}.self_attn.q_b_proj", query, heads * size)
        rotary = rank.number("qk_rope_head_dim")
        total += rank.whole(f"{name}.self_attn.kv_a_proj_with_mqa", rank.hidden, latent + rotary) + rank.vector(latent)
        total += rank.column(f"{name}.self_attn.kv_b_proj", latent, heads * (size - rotary + values))
        total += rank.row(f"{name}.self_attn.o_proj", heads * values, rank.hidden)
        return total + mlp(rank, f"{name}.mlp", rank.number("intermediate_size")) + rank.vector(*[rank.hidden] * 2)

    return decoder(rank, layer, tied=True, spread=ALL)


def routed(
    rank: Rank,
    prefix: str,
    attend: Callable[[str, int], int],
    sparse: Callable[[int], bool],
    route: Callable[[str], int],
    **rest: Any,
) -> Weights:
    """A decoder in which layers that are `sparse` have experts, of `route` bytes, and all others an MLP."""

    def layer(index: int) -> int:
        name = f"{prefix}layers.{index}"
        total = attend(f"{name}.self_attn", index) + rank.vector(*[rank.hidden] * 2)
        if sparse(index):
            return total + route(f"{name}.mlp")
        return total + mlp(rank, f"{name}.mlp", rank.number("intermediate_size"))

    return decoder(rank, layer, **rest)


def from_dense(rank: Rank) -> Callable[[int], bool]:
    """Layers with experts where the first ones have none (`first_k_dense_replace`, `moe_layer_freq`)."""
    first, every = rank.number("first_k_dense_replace", default=0), rank.number("moe_layer_freq", default=1)
    return lambda index: index >= first and index % every == 0


def shared_size(rank: Rank) -> int:
    """Elements inside DeepSeek's shared experts, which are one MLP."""
    return rank.number("n_shared_experts", default=0) * rank.number("moe_intermediate_size")


def deepseek(rank: Rank, prefix: str, gate_width: int | None = None) -> Weights:
    """DeepSeek-V2 and V3, Kimi K2."""
    count, inner, shared = rank.number("n_routed_experts"), rank.number("moe_intermediate_size"), shared_size(rank)
    corrected = rank.value("topk_method", "noaux_tc") == "noaux_tc"
    return routed(
        rank,
        prefix,
        lambda name, index: latent_attention(rank, name, bias=bool(rank.value("attention_bias", False))),
        from_dense(rank),
        lambda name: experts(
            rank, name, count, inner, shared=shared, correction=FLOAT32 * corrected, gate_width=gate_width
        ),
    )


def glm4_moe_lite(rank: Rank, prefix: str) -> Weights:
    """GLM-4.7 Flash: DeepSeek-V3 with routers in float32."""
    return deepseek(rank, prefix, FLOAT32)


def qwen3_moe(rank: Rank, prefix: str) -> Weights:
    """Qwen3 with experts in every layer, or in every so manyth."""
    count, inner = rank.number("num_experts"), rank.number("moe_intermediate_size")
    every, without = rank.number("decoder_sparse_step", default=1), rank.value("mlp_only_layers") or ()
    bias = bool(rank.value("attention_bias", False))
    return routed(
        rank,
        prefix,
        lambda name, index: attention(rank, name, bias=bias, norm="head"),
        lambda index: index not in without and (index + 1) % every == 0,
        lambda name: experts(rank, name, count, inner, gate_packed=True),
        spread=ALL,
    )


def glm4_moe(rank: Rank, prefix: str) -> Weights:
    """GLM-4.5 and its successors with full attention."""
    count, inner, shared = rank.number("n_routed_experts"), rank.number("moe_intermediate_size"), shared_size(rank)
    norm = "head" if rank.value("use_qk_norm", False) else ""
    bias = bool(rank.value("attention_bias", False))
    return routed(
        rank,
        prefix,
        lambda name, index: attention(rank, name, bias=bias, norm=norm),
        from_dense(rank),
        lambda name: experts(rank, name, count, inner, shared=shared, correction=FLOAT32, gate_width=FLOAT32),
    )


def minimax_m2(rank: Rank, prefix: str) -> Weights:
    """MiniMax M2: experts in every layer, norms over all heads."""
    count, inner = rank.number("num_local_experts"), rank.number("intermediate_size")
    correction = FLOAT32 * bool(rank.value("use_routing_bias", True))
    return routed(
        rank,
        prefix,
        lambda name, index: attention(rank, name, norm="rank" if rank.value("use_qk_norm", True) else ""),
        lambda index: True,
        lambda name: experts(rank, name, count, inner, correction=correction, gate_width=FLOAT32),
    )


def mixtral(rank: Rank, prefix: str) -> Weights:
    """Mixtral: experts in every layer."""
    count, inner = rank.number("num_local_experts"), rank.number("intermediate_size")
    return routed(
        rank,
        prefix,
        lambda name, index: attention(rank, name),
        lambda index: True,
        lambda name: experts(rank, name, count, inner),
        spread=ALL,
    )


def phimoe(rank: Rank, prefix: str) -> Weights:
    """Phi-3.5 MoE: norms and the head with biases, experts in every layer."""
    count, inner = rank.number("num_local_experts"), rank.number("intermediate_size")
    bias, hidden = bool(rank.value("attention_bias", False)), rank.hidden
    return routed(
        rank,
        prefix,
        lambda name, index: attention(rank, name, bias=bias, out_bias=bias) + rank.vector(hidden, hidden),
        lambda index: True,
        lambda name: experts(rank, name, count, inner),
        spread=ALL,
        norms=2,
        head_bias=bool(rank.value("lm_head_bias", False)),
    )


def mistral4(rank: Rank, prefix: str) -> Weights:
    """Mistral Small 4: latent attention and experts, by the generic class, without a correction of the router."""
    count, inner, shared = rank.number("n_routed_experts"), rank.number("moe_intermediate_size"), shared_size(rank)
    return routed(
        rank,
        prefix,
        lambda name, index: latent_attention(rank, name),
        from_dense(rank),
        lambda name: experts(rank, name, count, inner, shared=shared),
    )


def llama4(rank: Rank, prefix: str) -> Weights:
    """Llama 4: experts beside a shared one in every layer, or in every so manyth."""
    count, inner = rank.number("num_local_experts"), rank.number("intermediate_size")
    every = rank.number("interleave_moe_layer_step", default=1)
    bias = bool(rank.value("attention_bias", False))

    def layer(index: int) -> int:
        name = f"{prefix}layers.{index}"
        total = attention(rank, f"{name}.self_attn", bias=bias, out_bias=bias) + rank.vector(*[rank.hidden] * 2)
        if (index + 1) % every:
            return total + mlp(rank, f"{name}.feed_forward", rank.number("intermediate_size_mlp"))
        return total + experts(rank, f"{name}.feed_forward", count, inner, shared=inner)

    return decoder(rank, layer)


def mimo_v2(rank: Rank, prefix: str) -> Weights:
    """MiMo V2: windows with heads and sinks of their own, values smaller than keys, experts after the first layers."""
    windows, sparse = rank.value("hybrid_layer_pattern"), rank.value("moe_layer_freq")
    count, inner = rank.number("n_routed_experts"), rank.number("moe_intermediate_size")
    shared = (rank.number("n_shared_experts", default=0)) * inner

    def layer(index: int) -> int:
        name, swa = f"{prefix}layers.{index}", "swa_" if windows[index] else ""
        heads = rank.number(f"{swa}num_attention_heads")
        size, values = rank.number(f"{swa}head_dim"), rank.number(f"{swa}v_head_dim")
        mine, own = rank.share(heads, "query heads"), rank.heads(rank.number(f"{swa}num_key_value_heads"))
        parts = (mine * size, own * size, own * values)
        total = rank.linear(f"{name}.self_attn.qkv_proj", rank.hidden, parts, "heads")
        total += rank.row(f"{name}.self_attn.o_proj", heads * values, rank.hidden) + rank.vector(*[rank.hidden] * 2)
        sinks = rank.value(f"add_{'swa' if swa else 'full'}_attention_sink_bias", False)
        total += bool(sinks) * rank.vector(mine)
        if not sparse[index]:
            return total + mlp(rank, f"{name}.mlp", rank.number("intermediate_size"))
        return total + experts(rank, f"{name}.mlp", count, inner, shared=shared, correction=FLOAT32, gate_width=FLOAT32)

    return decoder(rank, layer)


def minimax_m3(rank: Rank, prefix: str) -> Weights:
    """MiniMax M3: dense layers first, then experts, and an index of blocks in their attention."""
    sparse = rank.value("moe_layer_freq")
    index = rank.value("sparse_attention_config") or {}
    count, inner = rank.number("num_local_experts"), rank.number("intermediate_size")
    shared = rank.number("n_shared_experts", default=0) * rank.number("shared_intermediate_size", default=inner)
    heads, keys = rank.number("num_attention_heads"), rank.fields.kv_heads.value
    size = rank.fields.head_dim.value
    indexed = index["sparse_attention_freq"]

    def layer(at: int) -> int:
        name = f"{prefix}layers.{at}"
        own = rank.heads(keys)
        parts = [rank.share(heads, "query heads") * size, own * size, own * size]
        total = rank.vector(size, size, *[rank.hidden] * 2)
        if indexed[at]:
            dim = int(index["sparse_index_dim"])
            parts += [rank.heads(int(index["sparse_num_index_heads"])) * dim, dim]
            total += rank.vector(dim, dim)
        total += rank.linear(f"{name}.self_attn.qkv_proj", rank.hidden, tuple(parts), "column")
        total += rank.row(f"{name}.self_attn.o_proj", heads * size, rank.hidden)
        if not sparse[at]:
            return total + mlp(rank, f"{name}.mlp", rank.number("dense_intermediate_size"))
        return total + experts(
            rank, f"{name}.block_sparse_moe", count, inner, shared=shared, correction=FLOAT32, gate_width=FLOAT32
        )

    return decoder(rank, layer)


def gpt_oss(rank: Rank, prefix: str) -> Weights:
    """gpt-oss: biases everywhere, a sink for each head, packed experts."""
    count, inner = rank.number("num_local_experts"), rank.number("intermediate_size")
    heads = rank.share(rank.number("num_attention_heads"), "query heads")

    def layer(index: int) -> int:
        name = f"{prefix}layers.{index}"
        total = attention(rank, f"{name}.attn", bias=True, out_bias=True) + rank.vector(heads, *[rank.hidden] * 2)
        total += rank.vector(count * (rank.hidden + 1))
        return total + rank.experts(f"{name}.mlp.experts", count, rank.hidden, inner, bias=True)

    return decoder(rank, layer, spread=ALL)


LLAMA = Dense(bias_field="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias")
QWEN2 = Dense(bias=True)
QWEN3 = Dense(bias_field="attention_bias", norm="head")
GEMMA2 = Dense(norms=4, bias_field="attention_bias", out_bias="attention_bias", tied=True, spread="embedding norm")
GEMMA3 = dataclasses.replace(GEMMA2, norm="head", vocabulary=262_208)

DECODERS: Mapping[str, Callable[[Rank, str], Weights]] = {
    "llama": LLAMA,
    "mistral": Dense(),
    "ministral3": Dense(),
    "granite": LLAMA,
    "smollm3": LLAMA,
    "seed_oss": Dense(bias=True, bias_field="attention_bias", out_bias="attention_out_bias"),
    "phi3": Dense(),
    "qwen2": QWEN2,
    "mimo": QWEN2,
    "qwen3": QWEN3,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "cohere": cohere,
    "cohere2": cohere,
    "olmo2": Dense(norm="all"),
    "olmo3": Dense(norm="all"),
    "exaone4": Dense(norm="head"),
    "exaone4_5_text": Dense(norm="head"),
    "hunyuan_v1_dense": Dense(norm="head"),
    "starcoder2": Dense(
        norms=4, bias_field="use_bias", bias=True, out_bias=True, mlp_bias=True, gated=False, tied=True, last=2
    ),
    "minicpm3": latent_dense,
    "deepseek_v2": deepseek,
    "deepseek_v3": deepseek,
    "kimi_k2": deepseek,
    "glm4_moe_lite": glm4_moe_lite,
    "qwen3_moe": qwen3_moe,
    "glm4_moe": glm4_moe,
    "glm4v_moe_text": glm4_moe,
    "minimax_m2": minimax_m2,
    "mixtral": mixtral,
    "gpt_oss": gpt_oss,
    "phimoe": phimoe,
    "mistral4": mistral4,
    "llama4_text": llama4,
    "mimo_v2_flash": mimo_v2,
    "minimax_m3_vl_text": minimax_m3,
    "qwen2_5_vl_text": QWEN2,
    "qwen3_vl_text": QWEN3,
    "qwen3_vl_moe_text": qwen3_moe,
}
"""Families by the decoder's `model_type`."""

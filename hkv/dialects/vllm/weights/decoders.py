"""Weights of decoders by family, as vLLM 0.33's classes hold them: transformers, dense and with experts.

A family whose layers differ from others' in constants is a `Dense` or a `Routed`; the others are functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from hkv.dialects.vllm.weights.rank import Rank, attention, experts, latent_attention, mlp
from hkv.errors import ConfigError

Family = Callable[[Rank, str], "Weights"]
"""Weights of a decoder on a rank; names of its modules have the prefix."""

FLOAT32 = 4
"""Bytes of an element of routers and correction biases that are kept in it."""

ALL = "embedding norm head"
"""All that is before and after the layers, on every pipeline stage: classes that do not ask which stage they are on."""


@dataclasses.dataclass(frozen=True)
class Weights:
    """Bytes of a model's parameters on one tensor-parallel rank, by the pipeline stages that hold them.

    The first stage has the embedding and encoders, with what joins them to the decoder; the last one the norm and the
    head, or the embedding again where they are tied. Every stage has `every`, and the parts named in `spread`.
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
    prefix: str,
    layer: Callable[[str, int], int],
    *,
    tied: bool = False,
    spread: str = "",
    norms: int = 1,
    head_bias: bool = False,
    vocabulary: int | None = None,
    count: int | None = None,
) -> Weights:
    """A decoder: embedding, layers of so many bytes each, a norm (2 vectors with a bias) and a head.

    The head is the embedding if it is `tied`, where the file does not say. `spread` names parts that every stage holds,
    `vocabulary` is the class's default of tokens, `count` the layers, where no field of the family counts them.
    """
    rows, size = rank.number("vocab_size", default=vocabulary), rank.hidden
    shared = bool(rank.value("tie_word_embeddings", tied))
    head = 0 if shared else rank.vocabulary(rows, size, head_bias)
    indices = range(rank.fields.num_layers if count is None else count)
    layers = tuple(layer(f"{prefix}layers.{index}", index) for index in indices)
    norm = rank.vector(*[size] * norms)
    return Weights(rank.vocabulary(rows, size), layers, norm, head, shared, spread)


def flag(rank: Rank, chosen: str | bool, default: bool = False) -> bool:
    """A truth value, or that of a field."""
    return bool(rank.value(chosen, default)) if isinstance(chosen, str) else chosen


@dataclasses.dataclass(frozen=True)
class Dense:
    """A family whose layers are all alike.

    Attributes:
      norms: vectors of a layer's norms; 4 with norms after attention and MLP too, 2 of each with biases.
      bias: default of a bias of queries, keys and values; the field says where it is named.
      bias_field: the field, or none.
      out_bias: the projection out has a bias: a field's name, or whether.
      mlp_bias: the same for the MLP.
      norm: norms of queries and keys, as `attention` has them.
      normed: there are any: a field's name, or whether.
      gated: MLPs have a gate.
      tied: the head is the embedding where the file does not say.
      spread: which of `embedding`, `norm` and `head` every pipeline stage holds.
      last: vectors of the last norm.
      vocabulary: tokens where published files leave the class's default out.
    """

    norms: int = 2
    bias: bool = False
    bias_field: str = ""
    out_bias: str | bool = False
    mlp_bias: str | bool = False
    norm: str = ""
    normed: str | bool = True
    gated: bool = True
    tied: bool = False
    spread: str = ""
    last: int = 1
    vocabulary: int | None = None

    def __call__(self, rank: Rank, prefix: str) -> Weights:
        bias = flag(rank, self.bias_field, self.bias) if self.bias_field else self.bias
        norm = self.norm if flag(rank, self.normed) else ""
        inner = rank.number("intermediate_size")

        def layer(name: str, index: int) -> int:
            total = attention(rank, f"{name}.self_attn", bias=bias, out_bias=flag(rank, self.out_bias), norm=norm)
            total += mlp(rank, f"{name}.mlp", inner, gated=self.gated, bias=flag(rank, self.mlp_bias))
            return total + rank.vector(*[rank.hidden] * self.norms)

        rest = {"tied": self.tied, "spread": self.spread, "norms": self.last, "vocabulary": self.vocabulary}
        return decoder(rank, prefix, layer, **rest)


Attend = Callable[[Rank, str, int], int]
"""Bytes of a layer's attention, by its name and number."""


def attend(norm: str = "", *, normed: str | bool = True, out_bias: str | bool = False) -> Attend:
    """Attention with the bias that `attention_bias` says, and norms where the field `normed` does."""

    def attended(rank: Rank, name: str, index: int) -> int:
        own = norm if flag(rank, normed) else ""
        return attention(rank, name, bias=flag(rank, "attention_bias"), out_bias=flag(rank, out_bias), norm=own)

    return attended


def latent(rank: Rank, name: str, index: int) -> int:
    """Latent attention with the bias that `attention_bias` says."""
    return latent_attention(rank, name, bias=flag(rank, "attention_bias"))


def from_dense(rank: Rank) -> Callable[[int], bool]:
    """Layers with experts where the first ones have none (`first_k_dense_replace`, `moe_layer_freq`)."""
    first, every = rank.number("first_k_dense_replace", default=0), rank.number("moe_layer_freq", default=1, least=1)
    return lambda index: index >= first and index % every == 0


def everywhere(rank: Rank) -> Callable[[int], bool]:
    """Experts in every layer."""
    return lambda index: True


def every_step(rank: Rank) -> Callable[[int], bool]:
    """Experts in every so manyth layer (`decoder_sparse_step`), but in none of `mlp_only_layers`."""
    every, without = rank.number("decoder_sparse_step", default=1, least=1), rank.value("mlp_only_layers", [])
    if not isinstance(without, list):
        raise ConfigError(rank.fields.place("mlp_only_layers"), without, "a list of layers without experts")
    return lambda index: index not in without and (index + 1) % every == 0


@dataclasses.dataclass(frozen=True)
class Routed:
    """A family in which some layers have experts, and all others an MLP.

    Attributes:
      attend: bytes of a layer's attention.
      sparse: which layers have experts.
      count: field of the number of experts.
      inner: field of the elements inside one.
      shared: there are shared experts, which are one MLP (`n_shared_experts`).
      correction: the router has a correction bias.
      float32: the router is in float32, whatever the model is in.
      gate_packed: the router is quantized as other layers are.
      norms: vectors of a layer's norms.
      spread: which of `embedding`, `norm` and `head` every pipeline stage holds.
      last: vectors of the last norm.
      head_bias: the head has a bias: a field's name, or whether.
    """

    attend: Attend
    sparse: Callable[[Rank], Callable[[int], bool]] = from_dense
    count: str = "n_routed_experts"
    inner: str = "moe_intermediate_size"
    shared: bool = False
    correction: bool | Callable[[Rank], bool] = False
    float32: bool = False
    gate_packed: bool = False
    norms: int = 2
    spread: str = ""
    last: int = 1
    head_bias: str | bool = False

    def __call__(self, rank: Rank, prefix: str) -> Weights:
        count, inner = rank.number(self.count), rank.number(self.inner)
        shared = rank.number("n_shared_experts", default=0) * rank.number("moe_intermediate_size") if self.shared else 0
        corrected = self.correction(rank) if callable(self.correction) else self.correction
        width = FLOAT32 if self.float32 else None
        sparse = self.sparse(rank)

        def layer(name: str, index: int) -> int:
            total = self.attend(rank, f"{name}.self_attn", index) + rank.vector(*[rank.hidden] * self.norms)
            if not sparse(index):
                return total + mlp(rank, f"{name}.mlp", rank.number("intermediate_size"))
            gate = {"correction": FLOAT32 * corrected, "gate_width": width, "gate_packed": self.gate_packed}
            return total + experts(rank, f"{name}.mlp", count, inner, shared=shared, **gate)

        head_bias = flag(rank, self.head_bias)
        return decoder(rank, prefix, layer, spread=self.spread, norms=self.last, head_bias=head_bias)


def latent_dense(rank: Rank, prefix: str) -> Weights:
    """MiniCPM3: latent attention before MLPs."""

    def layer(name: str, index: int) -> int:
        size = rank.number("qk_nope_head_dim") + rank.number("qk_rope_head_dim")
        heads, latent = rank.number("num_attention_heads", least=1), rank.number("kv_lora_rank")
        values = rank.number("v_head_dim", default=rank.hidden // heads)
        query = rank.number("q_lora_rank")
        total = rank.whole(f"{name}.self_attn.q_a_proj", rank.hidden, query) + rank.vector(query)
        total += rank.column(f"{name}.self_attn.q_b_proj", query, heads * size)
        rotary = rank.number("qk_rope_head_dim")
        total += rank.whole(f"{name}.self_attn.kv_a_proj_with_mqa", rank.hidden, latent + rotary) + rank.vector(latent)
        total += rank.column(f"{name}.self_attn.kv_b_proj", latent, heads * (size - rotary + values))
        total += rank.row(f"{name}.self_attn.o_proj", heads * values, rank.hidden)
        return total + mlp(rank, f"{name}.mlp", rank.number("intermediate_size")) + rank.vector(*[rank.hidden] * 2)

    return decoder(rank, prefix, layer, tied=True, spread=ALL)


def llama4(rank: Rank, prefix: str) -> Weights:
    """Llama 4: routed experts and a shared one in every layer, or in every so manyth."""
    count, inner = rank.number("num_local_experts"), rank.number("intermediate_size")
    every = rank.number("interleave_moe_layer_step", default=1, least=1)
    bias = bool(rank.value("attention_bias", False))

    def layer(name: str, index: int) -> int:
        total = attention(rank, f"{name}.self_attn", bias=bias, out_bias=bias) + rank.vector(*[rank.hidden] * 2)
        if (index + 1) % every:
            return total + mlp(rank, f"{name}.feed_forward", rank.number("intermediate_size_mlp"))
        return total + experts(rank, f"{name}.feed_forward", count, inner, shared=inner)

    return decoder(rank, prefix, layer)


def mimo_v2(rank: Rank, prefix: str) -> Weights:
    """MiMo V2: windows with heads and sinks of their own, values smaller than keys, experts after the first layers."""
    windows, sparse = rank.each_layer("hybrid_layer_pattern"), rank.each_layer("moe_layer_freq")
    count, inner = rank.number("n_routed_experts"), rank.number("moe_intermediate_size")
    shared = (rank.number("n_shared_experts", default=0)) * inner

    def layer(name: str, index: int) -> int:
        swa = "swa_" if windows[index] else ""
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

    return decoder(rank, prefix, layer)


def minimax_m3(rank: Rank, prefix: str) -> Weights:
    """MiniMax M3: dense layers first, then experts, and an index of blocks in their attention."""
    sparse, index = rank.each_layer("moe_layer_freq"), rank.inside("sparse_attention_config")
    count, inner = rank.number("num_local_experts"), rank.number("intermediate_size")
    shared = rank.number("n_shared_experts", default=0) * rank.number("shared_intermediate_size", default=inner)
    heads, keys = rank.number("num_attention_heads"), rank.fields.kv_heads.value
    size = rank.fields.head_dim.value
    indexed = index.each_layer("sparse_attention_freq")

    def layer(name: str, at: int) -> int:
        own = rank.heads(keys)
        parts = [rank.share(heads, "query heads") * size, own * size, own * size]
        total = rank.vector(size, size, *[rank.hidden] * 2)
        if indexed[at]:
            dim = index.number("sparse_index_dim")
            parts += [rank.heads(index.number("sparse_num_index_heads")) * dim, dim]
            total += rank.vector(dim, dim)
        total += rank.linear(f"{name}.self_attn.qkv_proj", rank.hidden, tuple(parts), "column")
        total += rank.row(f"{name}.self_attn.o_proj", heads * size, rank.hidden)
        if not sparse[at]:
            return total + mlp(rank, f"{name}.mlp", rank.number("dense_intermediate_size"))
        return total + experts(
            rank, f"{name}.block_sparse_moe", count, inner, shared=shared, correction=FLOAT32, gate_width=FLOAT32
        )

    return decoder(rank, prefix, layer)


def gpt_oss(rank: Rank, prefix: str) -> Weights:
    """gpt-oss: biases everywhere, a sink for each head, packed experts."""
    count, inner = rank.number("num_local_experts"), rank.number("intermediate_size")
    heads = rank.share(rank.number("num_attention_heads"), "query heads")

    def layer(name: str, index: int) -> int:
        total = attention(rank, f"{name}.attn", bias=True, out_bias=True) + rank.vector(heads, *[rank.hidden] * 2)
        total += rank.vector(count * (rank.hidden + 1))
        return total + rank.experts(f"{name}.mlp.experts", count, rank.hidden, inner, bias=True)

    return decoder(rank, prefix, layer, spread=ALL)


LLAMA = Dense(bias_field="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias")
QWEN2 = Dense(bias=True)
QWEN3 = Dense(bias_field="attention_bias", norm="head")
GEMMA2 = Dense(norms=4, bias_field="attention_bias", out_bias="attention_bias", tied=True, spread="embedding norm")
COHERE = dataclasses.replace(GEMMA2, norms=1, norm="rank", normed="use_qk_norm")  # for attention and MLP side by side
DEEPSEEK = Routed(latent, shared=True, correction=lambda rank: rank.value("topk_method", "noaux_tc") == "noaux_tc")
GLM4_MOE = Routed(attend("head", normed="use_qk_norm"), shared=True, correction=True, float32=True)
QWEN3_MOE = Routed(attend("head"), every_step, "num_experts", gate_packed=True, spread=ALL)
MIXTRAL = Routed(
    lambda rank, name, index: attention(rank, name), everywhere, "num_local_experts", "intermediate_size", spread=ALL
)

DECODERS: Mapping[str, Family] = {
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
    "gemma3_text": dataclasses.replace(GEMMA2, norm="head", vocabulary=262_208),
    "cohere": COHERE,
    "cohere2": COHERE,
    "olmo2": Dense(norm="all"),
    "olmo3": Dense(norm="all"),
    "exaone4": Dense(norm="head"),
    "exaone4_5_text": Dense(norm="head"),
    "hunyuan_v1_dense": Dense(norm="head"),
    "starcoder2": Dense(
        norms=4, bias_field="use_bias", bias=True, out_bias=True, mlp_bias=True, gated=False, tied=True, last=2
    ),
    "minicpm3": latent_dense,
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "kimi_k2": DEEPSEEK,
    "glm4_moe_lite": dataclasses.replace(DEEPSEEK, float32=True),
    "qwen3_moe": QWEN3_MOE,
    "glm4_moe": GLM4_MOE,
    "glm4v_moe_text": GLM4_MOE,
    "minimax_m2": dataclasses.replace(
        MIXTRAL,
        attend=lambda rank, name, index: attention(rank, name, norm="rank" if flag(rank, "use_qk_norm", True) else ""),
        correction=lambda rank: flag(rank, "use_routing_bias", True),
        float32=True,
        spread="",
    ),
    "mixtral": MIXTRAL,
    "gpt_oss": gpt_oss,
    "phimoe": dataclasses.replace(
        MIXTRAL, attend=attend(out_bias="attention_bias"), norms=4, last=2, head_bias="lm_head_bias"
    ),
    "mistral4": Routed(lambda rank, name, index: latent_attention(rank, name), shared=True),
    "llama4_text": llama4,
    "mimo_v2_flash": mimo_v2,
    "minimax_m3_vl_text": minimax_m3,
    "qwen2_5_vl_text": QWEN2,
    "qwen3_vl_text": QWEN3,
    "qwen3_vl_moe_text": QWEN3_MOE,
}
"""Families by the decoder's `model_type`."""

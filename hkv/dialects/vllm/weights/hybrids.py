"""Weights of decoders with recurrent layers, indexers or layers of several sizes, as vLLM 0.33's classes hold them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from hkv.dialects.vllm.weights.decoders import ALL, FLOAT32, Family, Routed, Weights, decoder
from hkv.dialects.vllm.weights.rank import Rank, attention, experts, latent_attention, mlp
from hkv.errors import ConfigError


def indexed(rank: Rank, name: str, index: int) -> int:
    """Latent attention of DeepSeek-V3.2 and GLM-5, with an indexer, unless it is shared."""
    heads, size = rank.number("index_n_heads"), rank.number("index_head_dim")
    total = latent_attention(rank, name)
    if rank.value("indexer_types") is not None and rank.each_layer("indexer_types")[index] == "shared":
        return total
    total += rank.whole(f"{name}.indexer.wq_b", rank.number("q_lora_rank"), heads * size)
    return total + rank.vector(rank.hidden * (heads + size)) + 2 * FLOAT32 * size


def gemma4(rank: Rank, prefix: str) -> Weights:
    """Gemma 4: heads of two sizes, layers that share caches, experts next to MLPs, embeddings of each layer."""
    kinds = rank.each_layer("layer_types")
    layers, hidden = rank.fields.num_layers, rank.hidden
    borrow = layers - rank.number("num_kv_shared_layers", default=0)
    inner, small = rank.number("intermediate_size"), rank.number("hidden_size_per_layer_input", default=0)
    wide = 2 if rank.value("use_double_wide_mlp", False) else 1
    count = rank.number("num_experts", default=0) if rank.value("enable_moe_block", False) else 0

    def layer(name: str, index: int) -> int:
        whole = kinds[index] == "full_attention"
        size = rank.number("global_head_dim" if whole else "head_dim")
        own = rank.number("num_key_value_heads")
        one = whole and bool(rank.value("attention_k_eq_v", False))
        shared = rank.number("num_global_key_value_heads", default=own) if one else own
        heads = rank.number("num_attention_heads")
        if index < borrow:
            total = attention(rank, f"{name}.self_attn", norm="head", size=size, kv_heads=shared)
        else:
            total = rank.column(f"{name}.self_attn.q_proj", hidden, heads * size) + rank.vector(size)
            total += rank.row(f"{name}.self_attn.o_proj", heads * size, hidden)
        total += mlp(rank, f"{name}.mlp", inner * (wide if index >= borrow else 1)) + rank.vector(*[hidden] * 4)
        if small:
            total += rank.vector(2 * small * hidden, hidden)
        if count:
            total += rank.vector(count * hidden, hidden, count, *[hidden] * 3)
            total += rank.experts(f"{name}.experts", count, hidden, rank.number("moe_intermediate_size"))
        return total

    found = decoder(rank, prefix, layer, tied=True, spread="embedding norm")
    if not small:
        return found
    rows = rank.number("vocab_size_per_layer_input", default=rank.number("vocab_size"))
    more = rank.vocabulary(rows, layers * small) + rank.column("per_layer_model_projection", hidden, layers * small)
    return dataclasses.replace(found, embedding=found.embedding + more + rank.vector(small))


def mamba2(rank: Rank, name: str, inner: int, fields: str, conv_bias: str) -> int:
    """`MambaMixer2` without a norm: one projection in, a convolution, a projection out, three vectors of the heads.

    The fields are those of its heads, its groups, its state and the convolution's width.
    """
    heads, groups, state, width = map(rank.number, fields.split())
    bias = bool(rank.value(conv_bias, True))
    mine = rank.share(heads, "Mamba heads")
    extra = 0 if groups % rank.ranks == 0 else rank.ranks - groups % rank.ranks
    own = (groups + extra) // rank.ranks * state
    part = rank.share(inner, "elements of Mamba's layers")
    total = rank.linear(f"{name}.in_proj", rank.hidden, (part, part + 2 * own, mine), "column", False)
    total += rank.vector((part + 2 * own) * (width + bias)) + rank.row(f"{name}.out_proj", inner, rank.hidden)
    return total + FLOAT32 * mine + rank.vector(mine, mine)


MAMBA2 = ("mamba_n_heads mamba_n_groups mamba_d_state mamba_d_conv", "mamba_conv_bias")
"""Fields that Falcon H1 and Granite 4 have for it."""


def falcon_h1(rank: Rank, prefix: str) -> Weights:
    """Falcon H1: attention and Mamba 2 side by side in every layer."""
    inner = rank.number("mamba_d_ssm", default=rank.number("mamba_expand", default=2) * rank.hidden)

    def layer(name: str, index: int) -> int:
        total = attention(rank, f"{name}.self_attn", bias=bool(rank.value("attention_bias", False)))
        total += mamba2(rank, f"{name}.mamba", inner, *MAMBA2)
        if rank.value("mamba_rms_norm", False):
            total += rank.vector(rank.share(inner, "elements of Mamba's layers"))
        total += mlp(rank, f"{name}.feed_forward", rank.number("intermediate_size"))
        return total + rank.vector(*[rank.hidden] * 2)

    return decoder(rank, prefix, layer)


def mamba1(rank: Rank, name: str, inner: int, state: int, width: int, time: int) -> int:
    """`MambaMixer` without norms: projections in and out, a convolution, and what the recurrence is made from."""
    part = rank.share(inner, "elements of Mamba's layers")
    total = rank.column(f"{name}.in_proj", rank.hidden, inner, inner) + rank.vector(part * (width + 1))
    total += rank.row(f"{name}.x_proj", inner, time + 2 * state)
    total += rank.column(f"{name}.dt_proj", time, inner, bias=True)
    return total + FLOAT32 * part * state + rank.vector(part) + rank.row(f"{name}.out_proj", inner, rank.hidden)


def falcon_mamba(rank: Rank, prefix: str) -> Weights:
    """Falcon Mamba and its kin: one norm and one mixer a layer."""
    inner = rank.number("intermediate_size", default=rank.number("expand", default=2) * rank.hidden)

    def layer(name: str, index: int) -> int:
        state, width = rank.number("state_size"), rank.number("conv_kernel")
        time = rank.number("time_step_rank", default=-(-rank.hidden // 16))
        return rank.vector(rank.hidden) + mamba1(rank, f"{name}.mixer", inner, state, width, time)

    return decoder(rank, "backbone.", layer, spread=ALL)


def granite_hybrid(rank: Rank, prefix: str) -> Weights:
    """Granite 4: Mamba 2 or attention, then experts next to one MLP."""
    kinds = rank.each_layer("layer_types", "layers_block_type")
    count, shared = rank.number("num_local_experts", default=0), rank.number("shared_intermediate_size", default=0)
    inner = rank.number("mamba_expand", default=2) * rank.hidden

    def layer(name: str, index: int) -> int:
        if kinds[index] == "attention":
            total = attention(rank, f"{name}.self_attn", bias=bool(rank.value("attention_bias", False)))
        else:
            total = mamba2(rank, f"{name}.mamba", inner, *MAMBA2)
            total += rank.vector(rank.share(inner, "elements of Mamba's layers"))
        if count:
            total += rank.vector(count * rank.hidden)
            elements = rank.number("intermediate_size")
            total += rank.experts(f"{name}.block_sparse_moe.experts", count, rank.hidden, elements)
        if shared:
            total += mlp(rank, f"{name}.shared_mlp", shared)
        return total + rank.vector(*[rank.hidden] * 2)

    return decoder(rank, prefix, layer, spread=ALL)


def jamba(rank: Rank, prefix: str) -> Weights:
    """Jamba: Mamba or attention, then an MLP or experts."""
    count, inner = rank.number("num_experts"), rank.number("intermediate_size")
    state, time = rank.number("mamba_d_state"), rank.number("mamba_dt_rank")
    every, first = rank.number("attn_layer_period", least=1), rank.number("attn_layer_offset")
    sparse, offset = rank.number("expert_layer_period", least=1), rank.number("expert_layer_offset")

    def layer(name: str, index: int) -> int:
        total = rank.vector(*[rank.hidden] * 2)
        if index % every == first:
            total += attention(rank, name)
        else:
            size = rank.number("mamba_expand") * rank.hidden
            total += mamba1(rank, f"{name}.mamba", size, state, rank.number("mamba_d_conv"), time)
            total += rank.vector(time, state, state)
        if index % sparse != offset or count == 1:
            return total + mlp(rank, f"{name}.feed_forward", inner)
        return total + experts(rank, f"{name}.feed_forward", count, inner)

    return decoder(rank, prefix, layer, spread=ALL)


def gated_delta(rank: Rank, prefix: str) -> Weights:
    """Qwen3-Next, Qwen3.5 and 3.6: gated delta nets or gated attention, then an MLP or experts."""
    kinds = rank.each_layer("layer_types") if rank.value("layer_types") is not None else None
    every = rank.number("full_attention_interval", default=4, least=1)
    count = rank.number("num_experts", default=0)
    keys, values = rank.number("linear_num_key_heads"), rank.number("linear_num_value_heads")
    key, value = rank.number("linear_key_head_dim"), rank.number("linear_value_head_dim")

    def layer(name: str, index: int) -> int:
        whole = kinds[index] == "full_attention" if kinds else (index + 1) % every == 0
        if whole:
            total = attention(
                rank,
                f"{name}.self_attn",
                bias=bool(rank.value("attention_bias", False)),
                norm="head",
                gated=bool(rank.value("attn_output_gate", True)),
            )
        else:
            net, wide = f"{name}.linear_attn", 2 * keys * key + values * value
            total = rank.column(f"{net}.in_proj_qkvz", rank.hidden, 2 * keys * key + values * value, values * value)
            total += rank.column(f"{net}.in_proj_ba", rank.hidden, values, values)
            total += rank.row(f"{net}.out_proj", values * value, rank.hidden)
            mine = rank.share(values, "value heads")
            total += rank.vector(rank.share(wide, "elements") * rank.number("linear_conv_kernel_dim"), mine, value)
            total += FLOAT32 * mine
        total += rank.vector(*[rank.hidden] * 2)
        if not count:
            return total + mlp(rank, f"{name}.mlp", rank.number("intermediate_size"))
        shared = rank.number("shared_expert_intermediate_size")
        inner = rank.number("moe_intermediate_size")
        return total + experts(rank, f"{name}.mlp", count, inner, shared=shared, shared_gate=bool(shared))

    spread = "embedding head" if rank.fields.model_type == "qwen3_next" else "embedding"
    return decoder(rank, prefix, layer, spread=spread)


LETTERS = {
    **{"mamba": "M", "linear_attention": "M"},
    **{"attention": "*", "full_attention": "*"},
    **{"mlp": "-", "moe": "E"},
}
"""Nemotron-H's kinds of layers, as patterns have them."""


def nemotron_h(rank: Rank, prefix: str) -> Weights:
    """Nemotron-H and Nemotron 3: one mixer a layer, by a pattern of letters."""
    pattern = rank.value("hybrid_override_pattern")
    if not pattern:
        pattern = "".join(LETTERS[kind] for kind in rank.each_layer("layers_block_type", among=LETTERS, count=1))
    elif not isinstance(pattern, str) or not set(LETTERS.values()) >= set(pattern):
        expected = f"a letter for each layer, one of {' '.join(dict.fromkeys(LETTERS.values()))}"
        raise ConfigError(rank.fields.place("hybrid_override_pattern"), pattern, expected)
    hidden = rank.hidden
    heads, size = rank.number("mamba_num_heads"), rank.number("mamba_head_dim")
    latent = rank.number("moe_latent_size", default=0)

    def moe(name: str) -> int:
        count, inner = rank.number("n_routed_experts"), rank.number("moe_intermediate_size")
        shared = rank.number("moe_shared_expert_intermediate_size") * rank.number("n_shared_experts", default=0)
        total = rank.vector(count * hidden) + FLOAT32 * count
        total += mlp(rank, f"{name}.shared_experts", shared, gated=False)
        total += rank.experts(f"{name}.experts", count, latent or hidden, inner, gated=False)
        if latent:
            total += rank.whole(f"{name}.fc1_latent_proj", hidden, latent)
            total += rank.whole(f"{name}.fc2_latent_proj", latent, hidden)
        return total

    def layer(layer_name: str, index: int) -> int:
        name, letter = f"{layer_name}.mixer", pattern[index]
        if letter == "*":
            head = rank.number("head_dim", "attention_head_dim")
            return rank.vector(hidden) + attention(rank, name, size=head)
        if letter == "-":
            return rank.vector(hidden) + mlp(rank, name, rank.number("intermediate_size"), gated=False)
        if letter == "E":
            return rank.vector(hidden) + moe(name)
        inner = heads * size
        total = mamba2(rank, name, inner, "mamba_num_heads n_groups ssm_state_size conv_kernel", "use_conv_bias")
        return total + rank.vector(hidden, rank.share(inner, "elements of Mamba's layers"))

    return decoder(rank, prefix, layer, count=len(pattern), spread=ALL)


def lfm2(rank: Rank, prefix: str) -> Weights:
    """LFM2: short convolutions or attention, then an MLP."""
    kinds = rank.each_layer("layer_types")
    inner = rank.number("block_ff_dim", "intermediate_size")
    if rank.value("block_auto_adjust_ff_dim", True):
        inner = int(int(2 * inner / 3) * rank.around("block_ffn_dim_multiplier", 1.0))
        multiple = rank.number("block_multiple_of", default=256, least=1)
        inner = -(-inner // multiple) * multiple
    wide = rank.number("block_dim", default=2560)

    def layer(name: str, index: int) -> int:
        total = rank.vector(*[rank.hidden] * 2) + mlp(rank, f"{name}.feed_forward", inner, size=wide)
        if kinds[index] == "full_attention":
            return total + attention(rank, f"{name}.self_attn", norm="head", out="out_proj")
        bias = bool(rank.value("conv_bias", False))
        total += rank.column(f"{name}.short_conv.in_proj", rank.hidden, *[rank.hidden] * 3, bias=bias)
        total += rank.row(f"{name}.short_conv.out_proj", rank.hidden, rank.hidden, bias)
        return total + rank.vector(
            rank.share(rank.hidden, "channels") * (rank.number("conv_L_cache", default=3) + bias)
        )

    return decoder(rank, prefix, layer, tied=True, spread="embedding norm")


def deepseek_v4(rank: Rank, prefix: str) -> Weights:
    """DeepSeek-V4: compressed latents, indexers, streams of hidden states, experts of four bits."""
    hidden, mult, size = rank.hidden, rank.number("hc_mult"), rank.number("head_dim")
    heads, low, groups = (
        rank.number("num_attention_heads"),
        rank.number("q_lora_rank"),
        rank.number("o_groups", least=1),
    )
    ratios, hashed = rank.each_layer("compress_ratios"), rank.number("num_hash_layers", default=0)
    count, inner, out = (
        rank.number("n_routed_experts"),
        rank.number("moe_intermediate_size"),
        rank.number("o_lora_rank"),
    )

    def compressor(width: int, ratio: int) -> int:
        twice = 2 if ratio == 4 else 1
        return FLOAT32 * ratio * twice * width + rank.vector(2 * twice * width * hidden, width)

    def layer(layer_name: str, index: int) -> int:
        name = f"{layer_name}.attn"
        total = 2 * FLOAT32 * ((2 + mult) * mult * (mult * hidden + 1) + 3) + rank.vector(low, size, hidden, hidden)
        total += rank.whole(f"{name}.fused_wqa_wkv", hidden, low, size)
        total += rank.column(f"{name}.wq_b", low, heads * size)
        total += rank.column(f"{name}.wo_a", heads * size // groups, groups * out)
        total += rank.row(f"{name}.wo_b", groups * out, hidden)
        total += FLOAT32 * max(64, rank.share(heads, "query heads"))
        if ratios[index] > 1:
            total += compressor(size, ratios[index])
        if ratios[index] == 4:
            own, dim = rank.number("index_n_heads"), rank.number("index_head_dim")
            total += rank.whole(f"{name}.indexer.wq_b", low, own * dim) + rank.vector(own * hidden)
            total += compressor(dim, 4)
        chosen = rank.number("vocab_size") * rank.number("num_experts_per_tok") if index < hashed else count
        shared = rank.number("n_shared_experts") * inner
        return total + 4 * chosen + experts(rank, f"{layer_name}.ffn", count, inner, shared=shared)

    found = decoder(rank, prefix, layer)
    return dataclasses.replace(found, every=FLOAT32 * (mult * (mult * hidden + 1) + 1))


HYBRIDS: Mapping[str, Family] = {
    "deepseek_v32": Routed(indexed, shared=True, correction=True),
    "glm_moe_dsa": Routed(indexed, shared=True, correction=True),
    "gemma4_text": gemma4,
    "falcon_h1": falcon_h1,
    "falcon_mamba": falcon_mamba,
    "granitemoehybrid": granite_hybrid,
    "jamba": jamba,
    "qwen3_next": gated_delta,
    "qwen3_5_text": gated_delta,
    "qwen3_5_moe_text": gated_delta,
    "nemotron_h": nemotron_h,
    "lfm2": lfm2,
    "deepseek_v4": deepseek_v4,
}
"""Families by the decoder's `model_type`."""

"""Weights of decoders with recurrent layers, indexers or layers of several sizes, as vLLM 0.33's classes hold them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from hkv.dialects.vllm.weights.blocks import attention, experts, latent_attention, mlp
from hkv.dialects.vllm.weights.decoders import FLOAT32, Weights, decoder, from_dense, routed, shared_size
from hkv.dialects.vllm.weights.rank import Rank


def indexed(rank: Rank, prefix: str) -> Weights:
    """DeepSeek-V3.2 and GLM-5: an indexer beside latent attention, in all layers or in those that share none."""
    count, inner, shared = rank.number("n_routed_experts"), rank.number("moe_intermediate_size"), shared_size(rank)
    heads, size = rank.number("index_n_heads"), rank.number("index_head_dim")
    kinds = rank.value("indexer_types")

    def attend(name: str, index: int) -> int:
        total = latent_attention(rank, name)
        if kinds is not None and kinds[index] == "shared":
            return total
        total += rank.whole(f"{name}.indexer.wq_b", rank.number("q_lora_rank"), heads * size)
        return total + rank.vector(rank.hidden * (heads + size)) + 2 * FLOAT32 * size

    return routed(
        rank,
        prefix,
        attend,
        from_dense(rank),
        lambda name: experts(rank, name, count, inner, shared=shared, correction=FLOAT32),
    )


def gemma4(rank: Rank, prefix: str) -> Weights:
    """Gemma 4: heads of two sizes, layers that share caches, experts beside MLPs, embeddings of each layer."""
    kinds = rank.value("layer_types")
    layers, hidden = rank.fields.num_layers, rank.hidden
    borrow = layers - rank.number("num_kv_shared_layers", default=0)
    inner, small = rank.number("intermediate_size"), rank.number("hidden_size_per_layer_input", default=0)
    wide = 2 if rank.value("use_double_wide_mlp", False) else 1
    count = rank.number("num_experts", default=0) if rank.value("enable_moe_block", False) else 0

    def layer(index: int) -> int:
        name = f"{prefix}layers.{index}"
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

    found = decoder(rank, layer, tied=True, embeds=True)
    if not small:
        return found
    rows = rank.number("vocab_size_per_layer_input", default=rank.number("vocab_size"))
    more = rank.vocabulary(rows, layers * small) + rank.column("per_layer_model_projection", hidden, layers * small)
    return dataclasses.replace(found, embedding=found.embedding + more + rank.vector(small))


def mamba2(rank: Rank, name: str, *, inner: int, heads: int, groups: int, state: int, width: int, bias: bool) -> int:
    """`MambaMixer2` without a norm: one projection in, a convolution, a projection out, three vectors of the heads."""
    mine = rank.share(heads, "Mamba heads")
    extra = 0 if groups % rank.ranks == 0 else rank.ranks - groups % rank.ranks
    own = (groups + extra) // rank.ranks * state
    part = rank.share(inner, "elements of Mamba's layers")
    total = rank.linear(f"{name}.in_proj", rank.hidden, (part, part + 2 * own, mine), "column", False)
    total += rank.vector((part + 2 * own) * (width + bias)) + rank.row(f"{name}.out_proj", inner, rank.hidden)
    return total + FLOAT32 * mine + rank.vector(mine, mine)


def falcon_h1(rank: Rank, prefix: str) -> Weights:
    """Falcon H1: attention and Mamba 2 side by side in every layer."""
    inner = rank.number("mamba_d_ssm", default=rank.number("mamba_expand", default=2) * rank.hidden)

    def layer(index: int) -> int:
        name = f"{prefix}layers.{index}"
        total = attention(rank, f"{name}.self_attn", bias=bool(rank.value("attention_bias", False)))
        total += mamba2(
            rank,
            f"{name}.mamba",
            inner=inner,
            heads=rank.number("mamba_n_heads"),
            groups=rank.number("mamba_n_groups"),
            state=rank.number("mamba_d_state"),
            width=rank.number("mamba_d_conv"),
            bias=bool(rank.value("mamba_conv_bias", True)),
        )
        if rank.value("mamba_rms_norm", False):
            total += rank.vector(rank.share(inner, "elements of Mamba's layers"))
        return total + mlp(rank, f"{name}.feed_forward", rank.number("intermediate_size")) + rank.vector(
            *[rank.hidden] * 2
        )

    return decoder(rank, layer)


def mamba1(rank: Rank, name: str, *, inner: int, state: int, width: int, time: int) -> int:
    """`MambaMixer` without norms: projections in and out, a convolution, and what the recurrence is made from."""
    part = rank.share(inner, "elements of Mamba's layers")
    total = rank.column(f"{name}.in_proj", rank.hidden, inner, inner) + rank.vector(part * (width + 1))
    total += rank.row(f"{name}.x_proj", inner, time + 2 * state)
    total += rank.column(f"{name}.dt_proj", time, inner, bias=True)
    return total + FLOAT32 * part * state + rank.vector(part) + rank.row(f"{name}.out_proj", inner, rank.hidden)


def falcon_mamba(rank: Rank, prefix: str) -> Weights:
    """Falcon Mamba and its kin: one norm and one mixer a layer."""
    inner = rank.number("intermediate_size", default=rank.number("expand", default=2) * rank.hidden)

    def layer(index: int) -> int:
        return rank.vector(rank.hidden) + mamba1(
            rank,
            f"backbone.layers.{index}.mixer",
            inner=inner,
            state=rank.number("state_size"),
            width=rank.number("conv_kernel"),
            time=rank.number("time_step_rank", default=-(-rank.hidden // 16)),
        )

    return decoder(rank, layer, embeds=True)


def granite_hybrid(rank: Rank, prefix: str) -> Weights:
    """Granite 4: Mamba 2 or attention, then experts beside one MLP."""
    kinds = rank.value("layer_types") or rank.value("layers_block_type")
    count, shared = rank.number("num_local_experts", default=0), rank.number("shared_intermediate_size", default=0)
    inner = rank.number("mamba_expand", default=2) * rank.hidden

    def layer(index: int) -> int:
        name = f"{prefix}layers.{index}"
        if kinds[index] == "attention":
            total = attention(rank, f"{name}.self_attn", bias=bool(rank.value("attention_bias", False)))
        else:
            total = mamba2(
                rank,
                f"{name}.mamba",
                inner=inner,
                heads=rank.number("mamba_n_heads"),
                groups=rank.number("mamba_n_groups"),
                state=rank.number("mamba_d_state"),
                width=rank.number("mamba_d_conv"),
                bias=bool(rank.value("mamba_conv_bias", True)),
            ) + rank.vector(rank.share(inner, "elements of Mamba's layers"))
        if count:
            total += rank.vector(count * rank.hidden)
            total += rank.experts(
                f"{name}.block_sparse_moe.experts", count, rank.hidden, rank.number("intermediate_size")
            )
        if shared:
            total += mlp(rank, f"{name}.shared_mlp", shared)
        return total + rank.vector(*[rank.hidden] * 2)

    return decoder(rank, layer)


def jamba(rank: Rank, prefix: str) -> Weights:
    """Jamba: Mamba or attention, then an MLP or experts."""
    count, inner = rank.number("num_experts"), rank.number("intermediate_size")
    state, time = rank.number("mamba_d_state"), rank.number("mamba_dt_rank")
    every, first = rank.number("attn_layer_period"), rank.number("attn_layer_offset")
    sparse, offset = rank.number("expert_layer_period"), rank.number("expert_layer_offset")

    def layer(index: int) -> int:
        name = f"{prefix}layers.{index}"
        total = rank.vector(*[rank.hidden] * 2)
        if index % every == first:
            total += attention(rank, name)
        else:
            size = rank.number("mamba_expand") * rank.hidden
            total += mamba1(
                rank, f"{name}.mamba", inner=size, state=state, width=rank.number("mamba_d_conv"), time=time
            ) + rank.vector(time, state, state)
        if index % sparse != offset or count == 1:
            return total + mlp(rank, f"{name}.feed_forward", inner)
        return total + experts(rank, f"{name}.feed_forward", count, inner)

    return decoder(rank, layer, embeds=True)


HYBRIDS: Mapping[str, Callable[[Rank, str], Weights]] = {
    "deepseek_v32": indexed,
    "glm_moe_dsa": indexed,
    "gemma4_text": gemma4,
    "falcon_h1": falcon_h1,
    "falcon_mamba": falcon_mamba,
    "granitemoehybrid": granite_hybrid,
    "jamba": jamba,
}
"""Families by the decoder's `model_type`."""

"""Parts that many decoders of vLLM 0.33 are put together from, in bytes on one rank: attention, MLPs, experts."""

from __future__ import annotations

from hkv.dialects.vllm.weights.rank import Rank


def attention(
    rank: Rank,
    name: str,
    *,
    bias: bool = False,
    out_bias: bool = False,
    norm: str = "",
    size: int | None = None,
    kv_heads: int | None = None,
    gated: bool = False,
    out: str = "o_proj",
) -> int:
    """`QKVParallelLinear`, the projection out and norms of queries and keys.

    Args:
      rank: the rank.
      name: the module's.
      bias: queries, keys and values have one.
      out_bias: the projection out has one.
      norm: `head` for norms over a head, `rank` for norms over a rank's heads, `all` over those of all ranks, or none.
      size: elements of a head; left out, the config's.
      kv_heads: key/value heads; left out, the config's.
      gated: queries come with as many gates.
      out: the projection's name.
    """
    fields = rank.fields
    size = fields.head_dim.value if size is None else size
    count = rank.number("num_attention_heads")
    heads = rank.share(count, "query heads")
    given = fields.kv_heads.value if kv_heads is None else kv_heads
    shared = rank.heads(given)
    parts = ((1 + gated) * heads * size, shared * size, shared * size)
    total = rank.linear(f"{name}.qkv_proj", rank.hidden, parts, "column", bias)
    total += rank.row(f"{name}.{out}", count * size, rank.hidden, out_bias)
    sizes = {"": (), "head": (1, 1), "rank": (heads, shared), "all": (count, given)}[norm]
    return total + rank.vector(*(each * size for each in sizes))


def latent_attention(rank: Rank, name: str, *, bias: bool = False) -> int:
    """Multi-head latent attention of DeepSeek-V2 and its kin, its indexer not counted."""
    heads = rank.number("num_attention_heads")
    latent, rotary = rank.number("kv_lora_rank"), rank.number("qk_rope_head_dim")
    plain, values = rank.number("qk_nope_head_dim"), rank.number("v_head_dim")
    compressed = rank.number("q_lora_rank", default=0)
    rank.share(heads, "query heads")
    query = heads * (plain + rotary)
    if compressed:
        total = rank.whole(f"{name}.fused_qkv_a_proj", rank.hidden, compressed, latent + rotary, bias=bias)
        total += rank.vector(compressed) + rank.column(f"{name}.q_b_proj", compressed, query)
    else:
        total = rank.whole(f"{name}.kv_a_proj_with_mqa", rank.hidden, latent + rotary, bias=bias)
        total += rank.column(f"{name}.q_proj", rank.hidden, query)
    total += rank.vector(latent) + rank.column(f"{name}.kv_b_proj", latent, heads * (plain + values))
    return total + rank.row(f"{name}.o_proj", heads * values, rank.hidden, bias)


def mlp(rank: Rank, name: str, inner: int, *, size: int | None = None, gated: bool = True, bias: bool = False) -> int:
    """Gate, up and down projections, or up and down alone."""
    size = rank.hidden if size is None else size
    up = (inner, inner) if gated else (inner,)
    first = "gate_up_proj" if gated else "up_proj"
    total = rank.column(f"{name}.{first}", size, *up, bias=bias)
    return total + rank.row(f"{name}.down_proj", inner, size, bias)


def experts(
    rank: Rank,
    name: str,
    count: int,
    inner: int,
    *,
    shared: int = 0,
    correction: int = 0,
    gate_width: int | None = None,
    gate_packed: bool = False,
    shared_gate: bool = False,
    gated: bool = True,
) -> int:
    """Routed experts with their router, and shared ones.

    Args:
      rank: the rank.
      name: the module's.
      count: experts.
      inner: elements inside each.
      shared: elements inside the shared experts, 0 without any.
      correction: bytes of an element of the router's correction bias, 0 without one.
      gate_width: bytes of an element of the router; left out, the model's.
      gate_packed: the router is quantized as other layers are.
      shared_gate: the shared expert has a gate.
      gated: experts have gate and up projections.
    """
    width = rank.width if gate_width is None else gate_width
    total = rank.whole(f"{name}.gate", rank.hidden, count) if gate_packed else count * rank.hidden * width
    total += count * correction
    total += rank.experts(f"{name}.experts", count, rank.hidden, inner, gated=gated)
    if shared:
        total += mlp(rank, f"{name}.shared_experts", shared, gated=gated)
    return total + shared_gate * rank.vector(rank.hidden)

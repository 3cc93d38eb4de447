"""The block that RTP-LLM makes of one layer's description, on one rank of a server."""

from __future__ import annotations

from fractions import Fraction

from hkv.dialects.rtp_llm.planning.options import RtpOptions
from hkv.dialects.rtp_llm.planning.sizes import (
    BlockBytes,
    element_of,
    linear,
    mha,
    mla,
    opaque,
    region_of,
)
from hkv.errors import PlanError
from hkv.spec import AttentionSpec, LayerSpec, attention_of

KERNEL_MULTIPLE = 128
"""Tokens of which the kernel blocks of compressed caches are a multiple (RTP-LLM)."""


def block_of(spec: LayerSpec, options: RtpOptions, latent_sizes: tuple[int, int] | None = None) -> BlockBytes:
    """One block, on one rank, of a layer that has the heads of all; latents come with their rotary key's elements."""
    if (region := region_of(spec)) is not None:
        kernel = options.kernel_block_size or region.block_size
        if region.count == "compressed" and kernel % KERNEL_MULTIPLE:
            expected = f"a multiple of {KERNEL_MULTIPLE} tokens for compressed caches"
            raise PlanError("kernel_block_size", kernel, expected)
        return opaque(region, options)
    if spec.snapshot:
        return _linear(spec, options)
    if (attention := attention_of(spec)) is None:
        raise PlanError("spec", spec, "attention, a recurrent state or an opaque region under RTP-LLM")
    if spec.sinks:
        raise PlanError("sinks", spec.sinks, "0: a SWA group keeps a sequence's end under RTP-LLM, not its beginning")
    if spec.most_read and options.slicing_ranks > 1:
        expected = "1 with windows that no description sizes for all ranks: their blocks hold one rank's tokens"
        raise PlanError("context-parallel ranks", options.slicing_ranks, expected)
    if attention.single_vector:
        return _mla(attention, latent_sizes)
    if attention.value_size != attention.head_size:
        expected = f"{attention.head_size}: keys and values of one size under RTP-LLM"
        raise PlanError("head_size_v", attention.value_size, expected)
    return mha(
        heads=attention.num_kv_heads,
        head_dim=attention.head_size,
        block_size=attention.block_size,
        dtype=element_of(attention),
        tensor_parallel=options.tensor_parallel,
    )


def _mla(spec: AttentionSpec, latent_sizes: tuple[int, int] | None) -> BlockBytes:
    if latent_sizes is None or sum(latent_sizes) != spec.head_size:
        expected = f"elements of a latent and of its rotary key, {spec.head_size} together"
        raise PlanError("latent_sizes", latent_sizes, expected)
    lora, rope = latent_sizes
    return mla(lora=lora, rope=rope, block_size=spec.block_size, dtype=element_of(spec))


def _linear(spec: LayerSpec, options: RtpOptions) -> BlockBytes:
    """A gated delta net: a matrix a value head, and the convolution's last inputs (keys, queries, values)."""
    shapes = sorted(spec.state_tensors, key=lambda state: -len(state[0]))
    if [len(shape) for shape, _ in shapes] != [3, 2]:
        raise _unsized(spec)
    ((heads, size, size_v), state_dtype), ((taps, row), conv_dtype) = shapes
    keys = Fraction(row - heads * size, 2 * size)
    if size != size_v or keys < 1 or keys.denominator != 1:
        raise _unsized(spec)
    return linear(
        key_heads=int(keys),
        value_heads=heads,
        head_dim=size,
        conv_kernel=taps + 1,
        block_size=spec.block_size,
        tensor_parallel=options.tensor_parallel,
        state_dtype=state_dtype,
        conv_dtype=conv_dtype,
        dtype=conv_dtype,
    )


def _unsized(spec: LayerSpec) -> PlanError:
    shapes = [shape for shape, _ in spec.state_tensors]
    expected = "a square matrix a value head and a convolution of keys, queries and values: RTP-LLM sizes no other"
    return PlanError("states", shapes, expected)


# The number of blocks that a budget buys.


def blocks_for_budget(total: int, *, reserve: int = 0, paged: int, swa: int = 0, step: int = 1) -> int:
    """The largest N with `reserve + N * paged + ceil(N / step) * swa <= total`, in bytes; 0 if none (RTP-LLM).

    `paged` is what one more block of full and linear groups costs, `swa` one of SWA groups; `reserve` are fixed pools.
    """
    if paged + swa <= 0:
        raise PlanError("paged", paged, "bytes that a block costs")
    step = max(1, step)
    left = total - reserve
    if left < 0:
        return 0
    rounds, rest = divmod(left, step * paged + swa)
    inside = (rest - swa) // paged if paged and rest >= swa else 0
    return rounds * step + max(0, min(inside, step - 1))


# Windows and chunks of attention as SWA groups: blocks that have to stay at the end of a sequence.


def tail_blocks(window: LayerSpec) -> int:
    """Blocks at the end of a list that the next query reads at most; 2, RTP-LLM's default, where it reads fewer.

    A window begins anywhere; a chunk at a block, unless its size is no multiple of a block's.
    """
    size = window.block_size
    if window.slides or window.most_read % size:
        return max(2, 1 + -(-(window.most_read - 2) // size))
    return max(2, window.most_read // size)

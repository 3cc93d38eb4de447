"""Ranks and slots of blocks, on arrays: `hkv.dialects.rtp_llm.context_parallel.CpSlotMapper` inside `jit`.

Every argument may be an array or a scalar, int32; they broadcast. Lengths are in tokens, blocks are logical ones.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from hkv.state.loops import ceil_divide, divide, remainder


def local_blocks(tokens: Any, block_size: Any, ranks: Any) -> jax.Array:
    """Slots each rank needs for `tokens` tokens: the same on all, so that the last may stay unused on some."""
    return ceil_divide(ceil_divide(jnp.maximum(tokens, 0), block_size), ranks)


def effective_tokens(tokens: Any, block_size: Any, ranks: Any, dealt: Any) -> jax.Array:
    """The length for which a group allocates on a rank.

    Args:
      tokens: of the sequence.
      block_size: tokens per logical block.
      ranks: ranks that share the sequence.
      dealt: bool, whether the group's blocks are dealt out one by one (`CpMapping.BLOCK_ROUND_ROBIN`).
    """
    return jnp.where(dealt, local_blocks(tokens, block_size, ranks) * block_size, tokens)


def owner(block: Any, ranks: Any) -> tuple[jax.Array, jax.Array]:
    """Rank and slot of a logical block."""
    return remainder(block, ranks), divide(block, ranks)


def canonical_place(virtual_block: Any, ranks: Any) -> jax.Array:
    """Index, among a sequence's keys, of a whole virtual block's key: the last rank's in it, which covers them all."""
    return (jnp.asarray(virtual_block) + 1) * ranks - 1

"""Slots of a whole step: where its tokens go, on one rank, or on each of several that share a group's tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from hkv.cache.state import PAD
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.rules.parameters import GroupField


def slots_of(
    groups: jax.Array, rows: jax.Array, start: jax.Array, count: jax.Array, width: int
) -> tuple[jax.Array, jax.Array]:
    """Block and offset of `count` tokens of each row from position `start` on, int32[R, G, width] each.

    Args:
      groups: int32[G, 32], as in `hkv.dialects.vllm.rules.parameters.Parameters`.
      rows: int32[R, G, W], block ids.
      start: int32[R].
      count: int32[R].
      width: static; slots that are answered, -1 beyond `count` and where there is none.
    """
    token = jnp.arange(width)
    size = jnp.maximum(groups[:, GroupField.BLOCK], 1)[:, None]
    position = (start[:, None] + token)[:, None, :]
    mapped = (groups[:, GroupField.ONE_BLOCK] == 0) & (groups[:, GroupField.BLOCK] > 0)
    column = position // size
    inside = (token < count[:, None])[:, None, :] & mapped[:, None] & (column < rows.shape[2])
    block = jnp.take_along_axis(rows, jnp.where(inside, column, 0), axis=2)
    good = inside & (block != 0)
    return jnp.where(good, block, PAD), jnp.where(good, position % size, PAD)


def ranks_of(config: VllmConfig) -> np.ndarray:
    """Ranks that share each group's tokens under context parallelism, int32[G]; 1 for groups that every rank holds."""
    shared = [spec.shared_by_ranks for spec in config.topology.specs]
    return np.where(shared, config.context_parallel, 1).astype(np.int32)


def on_rank(
    blocks: jax.Array, offsets: jax.Array, ranks: jax.Array, rank: jax.Array, interleave: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The slots of a step that are one rank's, with offsets in its own part of the block (`slots.slot_mapping`).

    A block of a shared group holds the tokens of all ranks; they are dealt out, `interleave` at a time.

    Args:
      blocks: int32[R, G, T], of a `StepResult`.
      offsets: int32[R, G, T].
      ranks: int32[G], from `ranks_of`.
      rank: int32[].
      interleave: int32[], consecutive tokens that stay together; a divisor of every shared group's block on one rank.

    Returns:
      Blocks and offsets of the same shape, -1 for tokens of other ranks.
    """
    ranks = jnp.asarray(ranks)[:, None]
    deal = offsets // interleave
    own = (offsets >= 0) & ((ranks == 1) | (deal % ranks == rank))
    local = jnp.where(ranks == 1, offsets, deal // ranks * interleave + offsets % interleave)
    return jnp.where(own, blocks, PAD), jnp.where(own, local, PAD)

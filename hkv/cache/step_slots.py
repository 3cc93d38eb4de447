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


def state_blocks(
    groups: jax.Array, rows: jax.Array, lengths: jax.Array, computed: jax.Array, counts: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Blocks of the states that rows read before `counts` tokens, and write after them.

    Args:
      groups: int32[G, 32], as in `hkv.dialects.vllm.rules.parameters.Parameters`.
      rows: int32[R, G, W], block ids after the step.
      lengths: int32[R, G], entries of the rows before the step: a block that came with it holds no state yet.
      computed: int32[R], tokens before the step.
      counts: int32[R], of the step; 0 for rows that compute nothing.

    Returns:
      int32[R, G] twice. Read: the state after `computed` tokens; 0 where there is none, which begins with zeros. Write:
      the state after `computed + counts` tokens; -1 for rows and groups that write none.
    """
    holds = (groups[:, GroupField.STATES] != 0) & (counts > 0)[:, None]
    size = jnp.maximum(groups[:, GroupField.BLOCK], 1)
    single = groups[:, GroupField.ONE_BLOCK] != 0

    def block(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Columns of states after `tokens` int32[R] tokens, and their blocks, int32[R, G] each."""
        column = jnp.where(single, 0, (tokens[:, None] - 1) // size)
        inside = jnp.clip(column, 0, rows.shape[2] - 1)
        return column, jnp.take_along_axis(rows, inside[:, :, None], axis=2)[:, :, 0]

    column, read = block(computed)
    there = holds & (computed > 0)[:, None] & (column < lengths)
    _, written = block(computed + counts)
    return jnp.where(there, read, 0), jnp.where(holds & (written != 0), written, PAD)


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

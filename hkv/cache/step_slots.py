"""Slots of a whole step: where its tokens go, on one rank, or on each of several that share a group's tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from hkv.cache.queries import block_sizes, field, spread
from hkv.cache.spans import count_up
from hkv.cache.state import PAD
from hkv.cache.token_hashing import of_queries, token_queries
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.rules.parameters import GroupField
from hkv.state.loops import divide


def slots_of(
    groups: jax.Array,
    rows: jax.Array,
    lines: jax.Array,
    computed: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    size: int,
) -> tuple[jax.Array, jax.Array]:
    """Block and offset of every token of a ragged batch, int32[G, size] each; -1 where there is none.

    Args:
      groups: int32[G, 32], as in `hkv.dialects.vllm.rules.parameters.Parameters`.
      rows: int32[R, G, W], block ids.
      lines: int32[Q], the row of each query.
      computed: int32[Q], the position of its first token.
      starts: int32[Q], the place of its first token, ascending.
      lengths: int32[Q], its tokens; 0 for queries that are answered none.
      size: static; places.
    """
    query, _ = token_queries(jnp.append(starts, size), size)
    place = count_up(size)
    start, end, before, line = of_queries(query, starts, starts + lengths, computed - starts, lines)
    live = (place >= start) & (place < end)
    block_size = block_sizes(groups).T
    mapped = (groups[:, GroupField.ONE_BLOCK] == 0) & (groups[:, GroupField.BLOCK] > 0)
    position = jnp.broadcast_to((before + place)[None], (groups.shape[0], size))
    column = divide(position, block_size)
    inside = live[None] & mapped[:, None] & (column < rows.shape[2])
    block = rows[line[None], count_up(groups.shape[0])[:, None], jnp.where(inside, column, 0)]
    good = inside & (block != 0)
    return jnp.where(good, block, PAD), jnp.where(good, position - column * block_size, PAD)


def state_blocks(
    groups: jax.Array, rows: jax.Array, lines: jax.Array, lengths: jax.Array, computed: jax.Array, counts: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Blocks of the states that queries read before `counts` tokens, and write after them.

    Args:
      groups: int32[G, 32], as in `hkv.dialects.vllm.rules.parameters.Parameters`.
      rows: int32[R, G, W], block ids after the step.
      lines: int32[Q], the row of each query.
      lengths: int32[Q, G], entries of the rows before the step: a block that came with it holds no state yet.
      computed: int32[Q], tokens before the step.
      counts: int32[Q], of the step; 0 for queries that compute nothing.

    Returns:
      int32[Q, G] twice. Read: the state after `computed` tokens; 0 where there is none, which begins with zeros. Write:
      the state after `computed + counts` tokens; -1 for queries and groups that write none.
    """
    holds = (field(groups, GroupField.STATES) != 0) & (counts > 0)[:, None]
    single = field(groups, GroupField.ONE_BLOCK) != 0
    size, group = block_sizes(groups), count_up(groups.shape[0])[None]

    def block(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Columns of states after `tokens` int32[Q] tokens, and their blocks, int32[Q, G] each."""
        column = jnp.where(single, 0, divide(spread(groups, tokens) - 1, size))
        return column, rows[lines[:, None], group, jnp.clip(column, 0, rows.shape[2] - 1)]

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
      blocks: int32[G, N], of a `StepResult`.
      offsets: int32[G, N].
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

"""Padded and ragged batches: the tokens of R rows as `[R, T]`, or one row's after the other's, as steps take them."""

# jax.numpy types some of its own arguments as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import jax
import jax.numpy as jnp

from hkv.cache.spans import DROP, count_up, running_sum
from hkv.cache.state import PAD


def packed(tokens: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first `counts` tokens of every row, one row's after the other's.

    Args:
      tokens: int32[R, T].
      counts: int32[R], 0 to T.

    Returns:
      int32[R * T], of which what lies behind the last row's tokens is 0, and int32[R + 1], where each row's begin
      (`cu_q_lens`).
    """
    rows, width = tokens.shape
    ends = running_sum(counts)
    cu_q_lens = jnp.concatenate([jnp.zeros_like(ends, shape=1), ends])
    within = count_up(width)[None]
    place = jnp.where(within < counts[:, None], (ends - counts)[:, None] + within, rows * width)
    return jnp.zeros_like(tokens, shape=rows * width).at[place].set(tokens, **DROP), cu_q_lens


def padded(values: jax.Array, cu_q_lens: jax.Array, width: int) -> jax.Array:
    """Slots of each row's tokens, padded with -1 to `width` (static).

    Args:
      values: int32[G, N], slots of a `StepResult`.
      cu_q_lens: int32[R + 1].
      width: most tokens of a row.

    Returns:
      int32[R, G, width].
    """
    within = count_up(width)[None]
    start, end = cu_q_lens[:-1, None], cu_q_lens[1:, None]
    found = values[:, jnp.minimum(start + within, values.shape[1] - 1)]
    return jnp.swapaxes(jnp.where((start + within < end)[None], found, PAD), 0, 1)


def token_queries(cu_q_lens: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """The query that the token at each place belongs to, and which of its tokens it is.

    Args:
      cu_q_lens: int32[Q + 1], where each query begins, ascending.
      size: static; places.

    Returns:
      int32[size] twice; places outside all queries are given to one that does not have so many tokens, or begins later.
    """
    starts = cu_q_lens[:-1]
    marks = jnp.zeros_like(starts, shape=size).at[starts].add(1, **DROP)
    query = jnp.maximum(running_sum(marks) - 1, 0)
    return query, count_up(size) - starts[query]


def of_queries(query: jax.Array, *values: jax.Array) -> jax.Array:
    """Values int32[Q] of the query of each token, int32[values, size]. All are read at once.

    Args:
      query: int32[size], from `token_queries`.
      values: int32[Q] each.
    """
    return jnp.stack(values, axis=1).at[query].get(mode="clip", wrap_negative_indices=False).T

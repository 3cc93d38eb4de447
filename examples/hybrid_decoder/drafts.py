"""Draft tokens by prompt lookup: what followed the last two tokens when they last stood there."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def propose(history: jax.Array, length: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """Guesses the tokens that follow.

    Args:
      history: int32[R, N], tokens.
      length: int32[R], how many of them each row has.
      most: static; drafts at most.

    Returns:
      int32[R, most], and how many of them are meant, int32[R].
    """
    place = jnp.arange(history.shape[1])
    last = jnp.maximum(length - 1, 0)[:, None]
    before = jnp.maximum(last - 1, 0)
    previous = jnp.roll(history, 1, axis=1)
    same = history == jnp.take_along_axis(history, last, axis=1)
    pair = same & (previous == jnp.take_along_axis(history, before, axis=1)) & (place > 0)
    earlier = place < last
    found = jnp.max(jnp.where(earlier & pair, place, -1), axis=1)
    found = jnp.where(found < 0, jnp.max(jnp.where(earlier & same, place, -1), axis=1), found)
    at = found[:, None] + 1 + jnp.arange(most)
    drafts = jnp.take_along_axis(history, jnp.minimum(at, history.shape[1] - 1), axis=1)
    counts = jnp.where(found >= 0, jnp.clip(length - 1 - found, 0, most), 0)
    return drafts, counts

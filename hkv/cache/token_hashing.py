"""Hashing the tokens of many rows at once, a token at a time, to the keys of `hkv.keys.fingerprint`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from hkv.keys import fingerprint


def hash_tokens(
    size: jax.Array, chains: jax.Array, hashing: jax.Array, computed: jax.Array, tokens: jax.Array, counts: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Hashes the first `counts` tokens of each row, and notes the keys of hash blocks that they fill.

    Args:
      size: int32[], tokens in a hash block.
      chains: uint32[R, C, 4], the keys so far.
      hashing: uint32[R, 12], where hashing stands (`hkv.cache.state.HASH_WORDS`).
      computed: int32[R], tokens hashed before.
      tokens: int32[R, T].
      counts: int32[R].

    Returns:
      `chains` and `hashing` after them.
    """

    def absorb(hashing: jax.Array, t: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """One token of every row; `hkv.keys.fingerprint.keys`, a token at a time."""
        key, digest, words = hashing[:, :4], hashing[:, 4:8], hashing[:, 8:]
        place = (computed + t) % size
        digest = jnp.where((place == 0)[:, None], size.astype(jnp.uint32), digest)
        words = jnp.where((place % 4 == 0)[:, None], 0, words)
        token = lax.dynamic_index_in_dim(tokens, t, 1, keepdims=True).astype(jnp.uint32)
        words = jnp.where(jnp.arange(4) == (place % 4)[:, None], token, words)
        ends = place == size - 1
        full = (place % 4 == 3) | ends
        digest = jnp.where(full[:, None], fingerprint.absorb(digest, words), digest)
        linked = fingerprint.finish(fingerprint.absorb(key, fingerprint.finish(digest)))
        key = jnp.where(ends[:, None], linked, key)
        live = t < counts
        filled = jnp.where(live & ends, (computed + t) // size, chains.shape[1])
        new = jnp.concatenate([key, digest, words], axis=1)
        return jnp.where(live[:, None], new, hashing), (filled, key)

    width = tokens.shape[1]
    if width == 1:
        hashing, (filled, keys) = absorb(hashing, jnp.int32(0))
        filled, keys = filled[None], keys[None]
    else:
        hashing, (filled, keys) = lax.scan(absorb, hashing, jnp.arange(width))
    row = jnp.broadcast_to(jnp.arange(tokens.shape[0]), filled.shape)
    return chains.at[row, filled].set(keys, mode="drop"), hashing

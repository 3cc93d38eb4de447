"""Prefix keys computed on the device: 128 bits as four uint32 words, from tokens and the key before.

A block's tokens are digested by themselves, all blocks at once; then the digests are chained, block after block, so
that a key names every token from the first on. Words are mixed by multiplications by odd constants, rotations and
additions, and finished by the avalanche of 32-bit MurmurHash3, in the manner of its 128-bit variant for 32-bit
machines; keys are HKV's own, no engine's.

Keys are compared whole. As long as nobody chooses tokens in order to make them collide, two different prefixes have the
same key with probability 2**-128, and among n prefixes some two have with probability below n**2 / 2**129: for a
billion prefixes 1.5e-21. It is no cryptographic hash: where tenants must not be able to reach each other's cache, use
the hashes of `hkv.keys.chained`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROOT = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
"""Parent key of the first block."""

MULTIPLIERS = (0x239B961B, 0xAB0E9789, 0x38B34AE5, 0xA1E38B93)
ADDENDS = (0x561CCD1B, 0x0BCAA747, 0x96CD1C35, 0x32AC3B17)
INNER, OUTER = (15, 16, 17, 18), (19, 17, 15, 13)
"""Odd multipliers, addends, and how far a word's input and the word itself are rotated, one for each word."""


def keys(tokens: jax.Array, parent: jax.Array) -> jax.Array:
    """The keys of consecutive blocks of one request.

    Args:
      tokens: int32 or uint32[blocks, block size], the tokens of whole blocks.
      parent: uint32[4], the key of the block before them; `ROOT` for the first.

    Returns:
      uint32[blocks, 4]; row i names the prefix up to the end of block i.
    """

    def link(before: jax.Array, digest: jax.Array) -> tuple[jax.Array, jax.Array]:
        key = finish(absorb(before, digest))
        return key, key

    _, chained = lax.scan(link, parent.astype(jnp.uint32), digests(tokens))
    return chained


def digests(tokens: jax.Array) -> jax.Array:
    """The digest of each block by itself, uint32[blocks, 4], from tokens int32 or uint32[blocks, block size]."""
    blocks, size = tokens.shape
    padding = np.zeros((blocks, -size % 4), np.uint32)
    words = jnp.concatenate([tokens.astype(jnp.uint32), padding], axis=1).reshape(blocks, -1, 4)
    start = jnp.broadcast_to(jnp.uint32(size), (blocks, 4))
    state, _ = lax.scan(lambda h, four: (absorb(h, four), None), start, jnp.swapaxes(words, 0, 1))
    return finish(state)


def absorb(state: jax.Array, words: jax.Array) -> jax.Array:
    """Mixes four words into a state. Both are uint32[..., 4]."""
    h = [state[..., i] for i in range(4)]
    for i in range(4):
        word = words[..., i] * jnp.uint32(MULTIPLIERS[i])
        word = _rotate(word, INNER[i]) * jnp.uint32(MULTIPLIERS[(i + 1) % 4])
        mixed = _rotate(h[i] ^ word, OUTER[i]) + h[(i + 1) % 4]
        h[i] = mixed * jnp.uint32(5) + jnp.uint32(ADDENDS[i])
    return jnp.stack(h, axis=-1)


def finish(state: jax.Array) -> jax.Array:
    """Makes every bit of a state depend on all of it. uint32[..., 4]."""
    h = [state[..., i] for i in range(4)]
    h = _spread(h)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = [(word ^ (word >> shift)) * jnp.uint32(factor) for word in h]
    h = _spread([word ^ (word >> 16) for word in h])
    return jnp.stack(h, axis=-1)


def _spread(h: list[jax.Array]) -> list[jax.Array]:
    first = h[0] + h[1] + h[2] + h[3]
    return [first, *(word + first for word in h[1:])]


def _rotate(word: jax.Array, by: int) -> jax.Array:
    return (word << by) | (word >> (32 - by))

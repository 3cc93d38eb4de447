"""Keys of hash blocks that cover the tokens after them as well (`hash_lookahead`; vLLM 0.33 with EAGLE and MTP).

A draft layer's value at a position depends on the token after it: a block's key then names those tokens too, and
nothing has to be dropped after a hit. Here such a key is made of the block's link, its key without them, which the row
keeps in the key's place until those tokens are there; the row keeps its last tokens for that.
"""

# jax.numpy types some of its own arguments as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import jax
import jax.numpy as jnp

from hkv.cache.spans import DROP, count_up, cut
from hkv.cache.state import HASH_WORDS, StepState
from hkv.keys import fingerprint
from hkv.state.loops import divide


def lookahead(state: StepState) -> int:
    """Tokens after a hash block that its key covers as well; static."""
    return state.hashing.shape[1] - HASH_WORDS


def keyed(state: StepState, tokens: jax.Array, size: jax.Array) -> jax.Array:
    """Hash blocks of `size` tokens that have their keys when so many tokens are known. Elementwise."""
    ahead = lookahead(state)
    return divide(jnp.maximum(tokens - ahead, 0) if ahead else tokens, size)


def key_of(links: jax.Array, after: jax.Array) -> jax.Array:
    """The keys uint32[..., 4] of hash blocks with `links` uint32[..., 4], and tokens uint32[..., L] after them."""
    words = jnp.pad(after, [(0, 0)] * (after.ndim - 1) + [(0, -after.shape[-1] % 4)])
    for first in range(0, words.shape[-1], 4):
        links = fingerprint.absorb(links, words[..., first : first + 4])
    return fingerprint.finish(links)


def prompt_keys(links: jax.Array, tokens: jax.Array, size: jax.Array, ahead: int) -> jax.Array:
    """The key of each hash block of prompts, uint32[K, C, 4]; without meaning where tokens after it are lacking.

    Args:
      links: uint32[K, C, 4].
      tokens: int32[K, P].
      size: int32[], tokens of a hash block.
      ahead: static; tokens after it.
    """
    ends = (count_up(links.shape[1]) + 1) * size
    place = jnp.minimum(ends[:, None] + count_up(ahead)[None], tokens.shape[1] - 1)
    return key_of(links, tokens[:, place].astype(jnp.uint32))


def last_tokens(tokens: jax.Array, counts: jax.Array, ahead: int) -> jax.Array:
    """The last `ahead` (static) of the first `counts` int32[K] tokens of prompts int32[K, P], uint32[K, ahead]."""
    place = counts[:, None] - ahead + count_up(ahead)[None]
    found = jnp.take_along_axis(tokens, jnp.clip(place, 0, tokens.shape[1] - 1), axis=1)
    return jnp.where(place >= 0, found, 0).astype(jnp.uint32)


def settle(
    state: StepState,
    chains: jax.Array,
    lines: jax.Array,
    size: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    computed: jax.Array,
    tokens: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The keys of the hash blocks after which `counts` new tokens of each row bring what is lacking.

    Args:
      state: the cache before the step.
      chains: uint32[R, C, 4], with the links of the hash blocks that the tokens fill.
      lines: int32[Q], the row of each query.
      size: int32[], tokens of a hash block.
      starts: int32[Q], the place of each query's first token.
      counts: int32[Q].
      computed: int32[Q], tokens before.
      tokens: int32[N].

    Returns:
      The chains with keys, and the last tokens of each query's row, uint32[Q, L].
    """
    ahead, lanes = lookahead(state), tokens.shape[0]
    before = state.hashing[lines, HASH_WORDS:]
    done = keyed(state, computed, size)
    spans = cut((keyed(state, computed + counts, size) - done)[:, None], lanes)

    def tokens_at(query: jax.Array, position: jax.Array) -> jax.Array:
        """Tokens of queries int32[n] at positions int32[n, L], from the step or from what was kept, uint32[n, L]."""
        new = position - computed[query][:, None]
        place = jnp.clip(starts[query][:, None] + new, 0, lanes - 1)
        kept = jnp.take_along_axis(before[query], jnp.clip(new + ahead, 0, ahead - 1), axis=1)
        return jnp.where(new >= 0, tokens[place].astype(jnp.uint32), kept)

    query = spans.line
    column = done[query] + spans.within
    after = tokens_at(query, ((column + 1) * size)[:, None] + count_up(ahead)[None])
    keys = key_of(chains[lines[query], column], after)
    place = jnp.where(spans.live, lines[query], chains.shape[0])
    last = tokens_at(count_up(lines.shape[0]), (computed + counts - ahead)[:, None] + count_up(ahead)[None])
    return chains.at[place, column].set(keys, **DROP), last

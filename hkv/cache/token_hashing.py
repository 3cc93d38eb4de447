"""Hashing the new tokens of many requests at once to the keys of `hkv.keys.fingerprint`.

The tokens are cut at the ends of hash blocks. All pieces are digested at once, four tokens a round; the first link of
every request's chain is made at once, and only those of requests that fill several blocks follow one after the other.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from hkv.cache.spans import Spans, count_up, cut, running_sum
from hkv.keys import fingerprint
from hkv.state.loops import ceil_divide, divide, remainder

LANES = 8
"""Chains that are continued beside one another. More lanes make each link dearer, fewer make more rounds."""


class Hashed(NamedTuple):
    """Hashed tokens of Q requests, N in all.

    Attributes:
      tails: uint32[Q, 12], where hashing stands after them (`hkv.cache.state.HASH_WORDS`).
      filled: bool[N], one for each piece between two ends of hash blocks, whether it fills its block.
      request: int32[N], its request.
      column: int32[N], which hash block of the request it is.
      keys: uint32[N, 4], the block's key; means nothing for pieces that fill none.
    """

    tails: jax.Array
    filled: jax.Array
    request: jax.Array
    column: jax.Array
    keys: jax.Array


class _Pieces(NamedTuple):
    """Tokens `[begin, end)` of a hash block, one a lane; `first` int32[Q] and `number` int32[Q] are the requests'."""

    spans: Spans
    first: jax.Array
    number: jax.Array
    begin: jax.Array
    end: jax.Array


def hash_tokens(
    size: jax.Array, tails: jax.Array, computed: jax.Array, starts: jax.Array, counts: jax.Array, tokens: jax.Array
) -> Hashed:
    """Hashes `counts` tokens of each request, which follow those hashed before.

    Args:
      size: int32[], tokens in a hash block.
      tails: uint32[Q, 12], where hashing stands.
      computed: int32[Q], tokens hashed before.
      starts: int32[Q], the place of each request's first token; places of different requests do not overlap.
      counts: int32[Q].
      tokens: int32[N].
    """
    pieces = _cut(size, computed, counts, tokens.shape[0])
    digests, words = _digest(size, tails, computed, starts, tokens, pieces)
    filled = divide(remainder(computed, size) + counts, size)
    keys, last = _chain(tails[:, :4], fingerprint.finish(digests), pieces.first, filled)
    ended = jnp.clip(pieces.first + pieces.number - 1, 0, tokens.shape[0] - 1)
    after = jnp.concatenate([last, digests[ended], words[ended]], axis=1)
    line, within = pieces.spans.line, pieces.spans.within
    return Hashed(
        tails=jnp.where((counts > 0)[:, None], after, tails),
        filled=pieces.spans.live & (pieces.end == size),
        request=line,
        column=divide(computed[line], size) + within,
        keys=keys,
    )


def _cut(size: jax.Array, computed: jax.Array, counts: jax.Array, lanes: int) -> _Pieces:
    place = remainder(computed, size)
    count = jnp.where(counts > 0, ceil_divide(place + counts, size), 0)
    spans = cut(count[:, None], lanes)
    line, within = spans.line, spans.within
    begin = jnp.where(within == 0, place[line], 0)
    end = jnp.minimum(size, (place + counts)[line] - within * size)
    return _Pieces(spans, running_sum(count) - count, count, begin, end)


def _digest(
    size: jax.Array, tails: jax.Array, computed: jax.Array, starts: jax.Array, tokens: jax.Array, pieces: _Pieces
) -> tuple[jax.Array, jax.Array]:
    """The digest of each piece's block so far, and its last four tokens, uint32[N, 4] each."""
    line, within = pieces.spans.line, pieces.spans.within
    before = tails[line, 8:]
    begin, end = pieces.begin[:, None], pieces.end[:, None]
    # The place in `tokens` of the block's first token: the part that was hashed before would lie there.
    base = ((starts - remainder(computed, size))[line] + within * size)[:, None]
    whole = tokens.astype(jnp.uint32)
    rounds = jnp.max(jnp.where(pieces.spans.live, ceil_divide(pieces.end, 4) - divide(pieces.begin, 4), 0))

    def absorb(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        turn, digest, words = carry
        at = 4 * (divide(begin, 4) + turn) + count_up(4)[None]
        new = whole.at[base + at].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        four = jnp.where(at < begin, before, jnp.where(at < end, new, 0))
        first = at[:, :1]
        live = first < end
        full = live & ((first + 4 <= end) | (end == size))
        digest = jnp.where(full, fingerprint.absorb(digest, four), digest)
        return turn + 1, digest, jnp.where(live, four, words)

    fresh = jnp.full_like(before, 0) + size.astype(jnp.uint32)
    digest = jnp.where(begin > 0, tails[line, 4:8], fresh)
    _, digest, words = lax.while_loop(
        lambda carry: carry[0] < rounds, absorb, (jnp.zeros_like(rounds), digest, jnp.where(begin > 0, before, 0))
    )
    return digest, words


def _chain(keys: jax.Array, digests: jax.Array, first: jax.Array, filled: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Links digests uint32[N, 4] to the keys uint32[Q, 4] before, `filled` int32[Q] from lane `first` int32[Q] on.

    Returns:
      The key of each lane, uint32[N, 4], and each request's last one, uint32[Q, 4].
    """
    lanes, size = digests.shape[0], keys.shape[0]
    at = jnp.minimum(first, lanes - 1)
    begun = _link(keys, digests[at])
    linked = jnp.zeros_like(digests).at[jnp.where(filled > 0, at, lanes)].set(begun, mode="drop")
    many = filled > 1
    rank = running_sum(many)
    longer = rank[-1]
    order = jnp.zeros_like(first).at[jnp.where(many, rank - 1, size)].set(count_up(size), mode="drop")
    width = min(LANES, size)

    def batch(turn: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """First lanes, lengths and keys of the chains in one batch; lengths 0 behind the last."""
        place = turn * width + count_up(width)
        one = order[jnp.minimum(place, size - 1)]
        return first[one], jnp.where(place < longer, filled[one], 0), begun[one]

    def one_link(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        turn, step, start, length, key, linked = carry
        live = step < length
        place = jnp.where(live, start + step, lanes)
        key = _link(key, digests[jnp.minimum(place, lanes - 1)])
        linked = linked.at[place].set(key, mode="drop")
        done = step + 1 >= jnp.max(length)
        turn = jnp.where(done, turn + 1, turn)
        ahead = batch(turn)
        start, length = jnp.where(done, ahead[0], start), jnp.where(done, ahead[1], length)
        return turn, jnp.where(done, 1, step + 1), start, length, jnp.where(done, ahead[2], key), linked

    turn = jnp.zeros_like(longer)
    carry = (turn, turn + 1, *batch(turn), linked)
    *_, linked = lax.while_loop(lambda carry: carry[0] * width < longer, one_link, carry)
    last = linked[jnp.clip(first + filled - 1, 0, lanes - 1)]
    return linked, jnp.where((filled > 0)[:, None], last, keys)


def _link(keys: jax.Array, digests: jax.Array) -> jax.Array:
    """The keys of blocks after blocks with `keys`, as `fingerprint.keys` links them, uint32[n, 4]."""
    return fingerprint.finish(fingerprint.absorb(keys, digests))

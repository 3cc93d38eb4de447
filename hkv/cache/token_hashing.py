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
    size: jax.Array,
    tails: jax.Array,
    computed: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    tokens: jax.Array,
    longest: int | None = None,
) -> Hashed:
    """Hashes `counts` tokens of each request, which follow those hashed before.

    Args:
      size: int32[], tokens in a hash block.
      tails: uint32[Q, 12], where hashing stands.
      computed: int32[Q], tokens hashed before.
      starts: int32[Q], the place of each request's first token; places of different requests do not overlap.
      counts: int32[Q].
      tokens: int32[N].
      longest: static; most tokens of a request, None for N. Bounds the memory of chains.
    """
    longest = tokens.shape[0] if longest is None else longest
    pieces = _cut(size, computed, counts, tokens.shape[0])
    digests, words = _digest(size, tails, computed, starts, tokens, pieces)
    filled = divide(remainder(computed, size) + counts, size)
    keys, last = _chain(tails[:, :4], fingerprint.finish(digests), pieces, filled, longest)
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


def _chain(
    keys: jax.Array, digests: jax.Array, pieces: _Pieces, filled: jax.Array, longest: int
) -> tuple[jax.Array, jax.Array]:
    """Links digests uint32[N, 4] to the keys uint32[Q, 4] before, `filled` int32[Q] of each request's pieces.

    Returns:
      The key of each piece, uint32[N, 4], and each request's last one, uint32[Q, 4].
    """
    lanes, line = digests.shape[0], pieces.spans.line
    begun = _link(keys, digests[jnp.minimum(pieces.first, lanes - 1)])
    several = jnp.any(filled > 1)
    linked = lax.cond(several, lambda: _go_on(begun, digests, pieces, filled, longest), lambda: begun[line])
    last = linked[jnp.clip(pieces.first + filled - 1, 0, lanes - 1)]
    return linked, jnp.where((filled > 0)[:, None], last, keys)


def _go_on(begun: jax.Array, digests: jax.Array, pieces: _Pieces, filled: jax.Array, longest: int) -> jax.Array:
    """The key of each piece, uint32[N, 4], from those of each request's first one, uint32[Q, 4].

    Chains of several links are continued `LANES` at a time. The loop writes one line a trip and scatters nothing, so
    that XLA:CPU can compile it as one piece (`hkv.cache.single_thread`).
    """
    lanes, size, width = digests.shape[0], filled.shape[0], min(LANES, filled.shape[0])
    many, turns = filled > 1, -(-size // width)
    up_to, places = running_sum(many), turns * width
    rank, longer = jnp.maximum(up_to - 1, 0), up_to[-1]
    order = jnp.zeros_like(filled, shape=places).at[jnp.where(many, rank, places)].set(count_up(size), mode="drop")
    length = jnp.where(count_up(places) < longer, filled[order], 1).reshape(turns, width)
    # As many trips for each turn as the longest of its chains has links after the first.
    trips = jnp.max(length, axis=1) - 1
    ends = running_sum(trips)
    start, key = pieces.first[order].reshape(turns, width), begun[order].reshape(turns, width, 4)

    def one_link(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        trip, turn, step, held, made = carry
        before = jnp.where(step == 0, lax.dynamic_index_in_dim(key, turn, 0, keepdims=False), held)
        place = lax.dynamic_index_in_dim(start, turn, 0, keepdims=False) + step + 1
        linked = _link(before, digests[jnp.minimum(place, lanes - 1)])
        made = lax.dynamic_update_index_in_dim(made, linked.reshape(-1), trip, 0)
        done = trip + 1 >= lax.dynamic_index_in_dim(ends, turn, 0, keepdims=False)
        return trip + 1, turn + done.astype(jnp.int32), jnp.where(done, 0, step + 1), linked, made

    none, most = jnp.zeros_like(longer), min(lanes, turns * longest)
    made = jnp.zeros_like(begun, shape=(most, width * 4))
    carry = (none, none, none, jnp.zeros_like(begun, shape=(width, 4)), made)
    *_, made = lax.while_loop(lambda carry: carry[0] < ends[-1], one_link, carry)
    request, link = pieces.spans.line, pieces.spans.within
    trip = (ends - trips)[divide(rank, width)][request] + link - 1
    later = made.reshape(-1, 4)[jnp.clip(trip, 0, most - 1) * width + remainder(rank, width)[request]]
    return jnp.where((link > 0)[:, None], later, begun[request])


def _link(keys: jax.Array, digests: jax.Array) -> jax.Array:
    """The keys of blocks after blocks with `keys`, as `fingerprint.keys` links them, uint32[n, 4]."""
    return fingerprint.finish(fingerprint.absorb(keys, digests))

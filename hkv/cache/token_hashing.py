"""Hashing the new tokens of many requests at once to the keys of `hkv.keys.fingerprint`.

The new tokens of a step are cut at the ends of hash blocks, where they lie. All pieces are digested at once, four
tokens a round; the first link of every request's chain is made at once, and only those of requests that fill several
blocks follow one after the other. Whole prompts are a table of blocks, linked column by column.
"""

# jax.numpy types some of its own arguments as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from hkv.cache.spans import DROP, count_up, cut, of_queries, running_sum, token_queries, unified
from hkv.cache.state import HASH_WORDS, StepState
from hkv.keys import fingerprint
from hkv.state.loops import ceil_divide, divide, remainder

LANES = 8
"""Chains that are continued side by side. More lanes make each link dearer, fewer make more rounds."""


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
    """Pieces of requests, cut at the ends of their hash blocks: each lies at the lane of its first token.

    Attributes:
      live: bool[N], whether a piece begins at the lane.
      request: int32[N], the request of the lane's token.
      block: int32[N], how many of its blocks end before that, among those that its new tokens reach.
      begin: int32[N], tokens of the piece's block before it.
      end: int32[N], and with it.
      first: int32[Q], where the first token of each request's first block lies, or would lie.
    """

    live: jax.Array
    request: jax.Array
    block: jax.Array
    begin: jax.Array
    end: jax.Array
    first: jax.Array


def hash_tokens(
    size: jax.Array, tails: jax.Array, computed: jax.Array, starts: jax.Array, counts: jax.Array, tokens: jax.Array
) -> Hashed:
    """Hashes `counts` tokens of each request, which follow those hashed before.

    Args:
      size: int32[], tokens in a hash block.
      tails: uint32[Q, 12], where hashing stands.
      computed: int32[Q], tokens hashed before.
      starts: int32[Q], the place of each request's first token, ascending; no token is of two requests.
      counts: int32[Q].
      tokens: int32[N].
    """
    lanes, place = tokens.shape[0], remainder(computed, size)
    pieces = _cut(size, place, starts, counts, lanes)
    digests, words = _digest(size, tails, tokens, pieces)
    filled = divide(place + counts, size)
    keys, last = _chain(size, tails[:, :4], fingerprint.finish(digests), pieces, starts, filled)
    ended = jnp.clip(starts + jnp.maximum(counts - 1 - remainder(place + counts - 1, size), 0), 0, lanes - 1)
    after = jnp.concatenate([last, digests[ended], words[ended]], axis=1)
    return Hashed(
        tails=jnp.where((counts > 0)[:, None], after, tails),
        filled=pieces.live & (pieces.end == size),
        request=pieces.request,
        column=divide(computed, size)[pieces.request] + pieces.block,
        keys=keys,
    )


def hash_prompts(size: jax.Array, roots: jax.Array, tokens: jax.Array, counts: jax.Array, columns: int) -> jax.Array:
    """The key of each whole hash block of prompts, none of whose tokens was hashed before.

    All blocks are digested at once, and the chains of all prompts continued side by side.

    Args:
      size: int32[], tokens in a hash block.
      roots: uint32[K, 4], the key before each prompt's first.
      tokens: int32[K, P].
      counts: int32[K], tokens of each prompt.
      columns: static; most hash blocks of a prompt.

    Returns:
      uint32[K, columns, 4]; 0 behind a prompt's last whole block.
    """
    size, roots, tokens, counts = unified(size, roots, tokens, counts)
    requests, longest = tokens.shape
    lanes, whole = min(columns, longest), divide(counts, size)
    most, given = jnp.max(whole), tokens.astype(jnp.uint32)
    start = (count_up(lanes) * size)[:, None]

    def absorb(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        turn, digest = carry
        at = (4 * turn + count_up(4))[None]
        four = given.at[:, start + at].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        return turn + 1, fingerprint.absorb(digest, jnp.where((at < size)[None], four, 0))

    fresh = jnp.zeros_like(roots, shape=(requests, lanes, 4)) + size.astype(jnp.uint32)
    rounds, first = jnp.where(most > 0, ceil_divide(size, 4), 0), jnp.zeros_like(most)
    _, digests = lax.while_loop(lambda carry: carry[0] < rounds, absorb, (first, fresh))
    digests = fingerprint.finish(digests)

    def one_link(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        column, before, made = carry
        linked = _link(before, lax.dynamic_index_in_dim(digests, column, 1, keepdims=False))
        return column + 1, linked, lax.dynamic_update_index_in_dim(made, linked, column, 1)

    carry = (first, roots, jnp.zeros_like(digests))
    *_, made = lax.while_loop(lambda carry: carry[0] < most, one_link, carry)
    kept = jnp.where((count_up(lanes)[None] < whole[:, None])[:, :, None], made, 0)
    return jnp.pad(kept, ((0, 0), (0, columns - lanes), (0, 0)))


def _cut(size: jax.Array, place: jax.Array, starts: jax.Array, counts: jax.Array, lanes: int) -> _Pieces:
    request, _ = token_queries(jnp.append(starts, lanes), lanes)
    lane, first = count_up(lanes), starts - place
    start, end, origin = of_queries(request, starts, starts + counts, first)
    block = divide(jnp.maximum(lane - origin, 0), size)
    begin = lane - origin - block * size
    live = (lane < end) & ((lane == start) | ((lane > start) & (begin == 0)))
    return _Pieces(live, request, block, begin, jnp.minimum(size, begin + end - lane), first)


def _digest(size: jax.Array, tails: jax.Array, tokens: jax.Array, pieces: _Pieces) -> tuple[jax.Array, jax.Array]:
    """The digest of each piece's block so far, and its last four tokens, uint32[N, 4] each."""
    known = tails[pieces.request, 4:]
    begin, end = pieces.begin[:, None], pieces.end[:, None]
    # The place in `tokens` of the block's first token: the part that was hashed before would lie there.
    base = count_up(tokens.shape[0])[:, None] - begin
    whole = tokens.astype(jnp.uint32)
    rounds = jnp.max(jnp.where(pieces.live, ceil_divide(pieces.end, 4) - divide(pieces.begin, 4), 0))

    def absorb(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        turn, digest, words = carry
        at = 4 * (divide(begin, 4) + turn) + count_up(4)[None]
        new = whole.at[base + at].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        four = jnp.where(at < begin, known[:, 4:], jnp.where(at < end, new, 0))
        first = at[:, :1]
        live = first < end
        full = live & ((first + 4 <= end) | (end == size))
        digest = jnp.where(full, fingerprint.absorb(digest, four), digest)
        return turn + 1, digest, jnp.where(live, four, words)

    digest = jnp.where(begin > 0, known[:, :4], size.astype(jnp.uint32))
    carry = (jnp.zeros_like(rounds), digest, jnp.where(begin > 0, known[:, 4:], 0))
    _, digest, words = lax.while_loop(lambda carry: carry[0] < rounds, absorb, carry)
    return digest, words


def _chain(
    size: jax.Array, keys: jax.Array, digests: jax.Array, pieces: _Pieces, starts: jax.Array, filled: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Links digests uint32[N, 4] to the keys uint32[Q, 4] before, `filled` int32[Q] of each request's pieces.

    Returns:
      The key of each piece, uint32[N, 4], and each request's last one, uint32[Q, 4].
    """
    lanes = digests.shape[0]
    begun = _link(keys, digests[jnp.minimum(starts, lanes - 1)])
    several = jnp.max(filled) > 1
    linked = lax.cond(several, lambda: _go_on(size, begun, digests, pieces, filled), lambda: begun[pieces.request])
    ended = jnp.clip(jnp.maximum(pieces.first + (filled - 1) * size, starts), 0, lanes - 1)
    return linked, jnp.where((filled > 0)[:, None], linked[ended], keys)


def _go_on(size: jax.Array, begun: jax.Array, digests: jax.Array, pieces: _Pieces, filled: jax.Array) -> jax.Array:
    """The key of each piece, uint32[N, 4], from those of each request's first one, uint32[Q, 4].

    Chains of several links are continued `LANES` at a time. The loop writes one line a trip and scatters nothing, so
    that XLA:CPU can compile it as one piece (`hkv.serving.single_thread`).
    """
    lanes, requests, width = digests.shape[0], filled.shape[0], min(LANES, filled.shape[0])
    many, turns = filled > 1, -(-requests // width)
    up_to, places = running_sum(many), turns * width
    rank, longer = jnp.maximum(up_to - 1, 0), up_to[-1]
    order = jnp.zeros_like(filled, shape=places).at[jnp.where(many, rank, places)].set(count_up(requests), **DROP)
    length = jnp.where(count_up(places) < longer, filled[order], 1).reshape(turns, width)
    # As many trips for each turn as the longest of its chains has links after the first.
    trips = jnp.max(length, axis=1) - 1
    ends = running_sum(trips)
    start, key = pieces.first[order].reshape(turns, width), begun[order].reshape(turns, width, 4)

    def one_link(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        trip, turn, step, held, made = carry
        before = jnp.where(step == 0, lax.dynamic_index_in_dim(key, turn, 0, keepdims=False), held)
        place = lax.dynamic_index_in_dim(start, turn, 0, keepdims=False) + (step + 1) * size
        linked = _link(before, digests[jnp.minimum(place, lanes - 1)])
        made = lax.dynamic_update_index_in_dim(made, linked.reshape(-1), trip, 0)
        done = trip + 1 >= lax.dynamic_index_in_dim(ends, turn, 0, keepdims=False)
        return trip + 1, turn + done.astype(jnp.int32), jnp.where(done, 0, step + 1), linked, made

    none, most = jnp.zeros_like(longer), lanes
    made = jnp.zeros_like(begun, shape=(most, width * 4))
    carry = (none, none, none, jnp.zeros_like(begun, shape=(width, 4)), made)
    *_, made = lax.while_loop(lambda carry: carry[0] < ends[-1], one_link, carry)
    trip = (ends - trips)[divide(rank, width)][pieces.request] + pieces.block - 1
    later = made.reshape(-1, 4)[jnp.clip(trip, 0, most - 1) * width + remainder(rank, width)[pieces.request]]
    return jnp.where((pieces.block > 0)[:, None], later, begun[pieces.request])


def _link(keys: jax.Array, digests: jax.Array) -> jax.Array:
    """The keys of blocks after blocks with `keys`, as `fingerprint.keys` links them, uint32[n, 4]."""
    return fingerprint.finish(fingerprint.absorb(keys, digests))


# Keys of hash blocks that cover the tokens after them as well (`hash_lookahead`; vLLM 0.33 with EAGLE and MTP).
#
# A draft layer's value at a position depends on the token after it: a block's key then names those tokens too, and
# nothing has to be dropped after a hit. Here such a key is made of the block's link, its key without them, which the
# row keeps in the key's place until those tokens are there; the row keeps its last tokens for that.


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

"""One name for all states that differ only in what blocks and requests are called: 128 bits, computed on the device.

Blocks are named in the order of the free queue, then in that of the rows; of the orders of the requests, the one whose
digest is least counts. What no rule can tell apart is left out, and nothing else:

* where in its ring the queue lies, how often something was counted, and which operation or step it was: of the step
  only what was registered in it;
* why a key has no block (`NEVER_SEEN`, `EVICTED`, ...), which only statistics read, and the bits that stand for it;
* what a lookup found, once another operation followed; entries of rows that are not valid.

A field that is added to `hkv.state.state` belongs to the name without a change here.

Two different states have the same name with probability 2**-128; among n states some two with probability below
(6 n)**2 / 2**129 with three requests: for a hundred million states 5e-22.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from hkv.dialects.vllm.explorer.moves import LOOKED_UP, Fact
from hkv.dialects.vllm.explorer.picture import Picture
from hkv.dialects.vllm.explorer.space import Space
from hkv.keys import fingerprint
from hkv.state import key_table
from hkv.state.state import GROUP_WORDS, REQUEST_WORDS, Counter, Request, Row, State

PASSING = {Counter.HEAD, Counter.TAIL, Counter.EVICTIONS, Counter.DROPPED, Counter.CLOCK, Counter.STEP}
"""Counters that a name leaves out."""

OF_THE_LOOKUP = {Request.HIT, Row.HIT_FIRST, Row.HIT_LENGTH}
"""Fields that say what a lookup found."""

UNSAID = {Request.HIT_CLOCK, Request.GRANT_STEP, Request.WRITTEN, Request.JOINED, Row.NEW_FIRST}
"""Fields that a name leaves out: times, what only hits inside a block ask for, and what is only reported."""


def young(state: State) -> jax.Array:
    """bool[keys]: keys of states that were registered in this step."""
    return state.table[:-1, -1] == state.counters[Counter.STEP]


def name(space: Space, state: State, seen: Picture, ledger: jax.Array) -> jax.Array:
    """The name of a state, uint32[4].

    Args:
      space: the space.
      state: the state.
      seen: its picture.
      ledger: state of every request, as the operations tell it.
    """
    looked = ledger[:, Fact.FOCUS] == LOOKED_UP
    requests = _of_requests(space, state, ledger, looked)
    cells = jnp.concatenate([seen.rows, jnp.where(looked[:, None, None], seen.found, 0)], axis=2)
    blocks, links = _of_blocks(space, state, seen)
    whole = jnp.stack([state.counters[field] for field in Counter if field not in PASSING])
    if any(spec.snapshot for spec in space.config.topology.specs):
        whole = jnp.concatenate([whole, _packed(young(state))])
    orders = np.array(list(itertools.permutations(range(space.requests))))
    names = jax.vmap(lambda one, two: _digest(whole, one, two, seen, blocks, links))(requests[orders], cells[orders])
    least = names[0]
    for other in names[1:]:
        least = jnp.where(_less(other, least), other, least)
    return least


def _of_requests(space: Space, state: State, ledger: jax.Array, looked: jax.Array) -> jax.Array:
    """int32[R, n]: what is known of each request, blocks left out."""
    words = state.requests[:-1]
    chosen = [ledger]
    fields = [(field, int(field)) for field in Request]
    for group in range(len(space.config.topology.groups)):
        fields += [(field, REQUEST_WORDS + GROUP_WORDS * group + int(field)) for field in Row]
    for field, place in fields:
        if field in UNSAID:
            continue
        word = words[:, place]
        chosen.append(jnp.where(looked, word, 0)[:, None] if field in OF_THE_LOOKUP else word[:, None])
    return jnp.concatenate(chosen, axis=1)


def _of_blocks(space: Space, state: State, seen: Picture) -> tuple[jax.Array, jax.Array]:
    """Words that describe each block: numbers, and ids of other blocks.

    Returns:
      int32[B, n], numbers; int32[B, m], other blocks.
    """
    blocks, groups = space.config.num_blocks, space.buckets.groups
    table = state.table.reshape(-1)
    numbers, others = [seen.refs, seen.queued], []
    for part in range(space.buckets.parts + 1):
        word = state.keys[:blocks, part]
        entry = (word >> 2) - 1 if part == 0 else word - 1
        known = entry >= 0
        value = jnp.where(known, table[jnp.clip(entry, 0, len(table) - groups - 1)], 0)
        several = known & (value > 0) & (value & 1 == 1)
        numbers += [word & ~key_table.SHARED if part == 0 else word, several, known & (value > 0)]
        if part == 0:
            numbers.append(several & (word & key_table.SHARED == 0))
        others += [jnp.where(value > 0, value >> 3, 0)]
        others += [jnp.where(several, state.links[:blocks, 2 * part + side], 0) for side in (0, 1)]
    return jnp.stack([jnp.asarray(n, jnp.int32) for n in numbers], axis=1), jnp.stack(others, axis=1)


def _digest(
    whole: jax.Array, requests: jax.Array, cells: jax.Array, seen: Picture, blocks: jax.Array, links: jax.Array
) -> jax.Array:
    """The digest of a state whose requests stand in this order."""
    ids = np.arange(blocks.shape[0])
    flat = cells.reshape(-1)
    first = jnp.min(jnp.where(flat[:, None] == ids, np.arange(len(flat))[:, None], len(flat)), axis=0)
    order = jnp.where(seen.queued > 0, seen.place, len(ids) + first)
    order = jnp.where(ids == 0, -1, order * len(ids) + ids)
    called = jnp.sum(order[None, :] < order[:, None], axis=1)
    named = called[:, None] == ids
    numbers = jnp.sum(jnp.where(named[:, :, None], blocks[:, None, :], 0), axis=0)
    renamed = _called(links, called)
    others = jnp.sum(jnp.where(named[:, :, None], renamed[:, None, :], 0), axis=0)
    parts = [requests.reshape(-1), _called(flat, called), numbers.reshape(-1), others.reshape(-1)]
    return _mixed(jnp.concatenate([whole.astype(jnp.uint32), _paired(jnp.concatenate(parts))]))


def _called(ids: jax.Array, called: jax.Array) -> jax.Array:
    chosen = ids[..., None] == np.arange(called.shape[0])
    return jnp.sum(jnp.where(chosen, called, 0), axis=-1)


def _paired(values: jax.Array) -> jax.Array:
    """Two values in a word, 16 bits each: all are small, but for the one that means that there is no limit."""
    low = (jnp.concatenate([values, jnp.zeros(-len(values) % 2, jnp.int32)]) & 0xFFFF).astype(jnp.uint32).reshape(-1, 2)
    return low[:, 0] | (low[:, 1] << 16)


def _packed(bits: jax.Array) -> jax.Array:
    padded = jnp.concatenate([bits, jnp.zeros(-len(bits) % 32, bool)]).reshape(-1, 32)
    weights = np.uint32(1) << np.arange(32, dtype=np.uint32)
    return jnp.sum(jnp.where(padded, weights, 0), axis=1, dtype=jnp.uint32).astype(jnp.int32)


def _mixed(words: jax.Array) -> jax.Array:
    """uint32[4] of uint32[n]: HKV's key mixing (`hkv.keys.fingerprint`), words in columns of four."""
    padded = jnp.concatenate([words, jnp.zeros(-len(words) % 4, jnp.uint32)]).reshape(-1, 4)
    start = jnp.full(4, len(words), jnp.uint32)
    state, _ = jax.lax.scan(lambda state, four: (fingerprint.absorb(state, four), None), start, padded)
    return fingerprint.finish(state)


def _less(a: jax.Array, b: jax.Array) -> jax.Array:
    """True if four words are less than four others, the first difference counting."""
    answer = jnp.zeros((), bool)
    for i in reversed(range(4)):
        answer = (a[i] < b[i]) | ((a[i] == b[i]) & answer)
    return answer

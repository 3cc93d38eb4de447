"""Picture of a state, read off the compiled cache's arrays without its rules, and its name. `vmap` makes it many."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hkv.dialects.vllm.explorer.moves import LOOKED_UP, Fact
from hkv.dialects.vllm.explorer.space import Space
from hkv.dialects.vllm.rules.parameters import GroupField, of_config
from hkv.keys import fingerprint
from hkv.state.key_table import PARTS, SHARED
from hkv.state.state import GROUP_WORDS, REQUEST_WORDS, Counter, Request, Row, State

FAR = 1 << 20
"""Larger than any place."""


class Picture(NamedTuple):
    """A state as arrays by block id and by row. There are B blocks, the null block included, R requests, G groups,
    and at most W columns in a row.

    Attributes:
      queued: int32[B], how often the block stands in the queue.
      place: int32[B], how many blocks stand before it; `FAR` for a block that does not.
      refs: int32[B], references.
      key: int32[B], the string of the block's primary key, 0 for none.
      group: int32[B], the group of that key; -1 for none.
      rows: int32[R, G, W], block ids; 0 where null, and beyond the row.
      lengths: int32[R, G], columns of a row, null ones included.
      found: int32[R, G, W], what the last lookup of a request found, in the same form; only of use right after it.
      hits: int32[R], tokens it found.
      listed: bool, the key table leads to exactly the blocks that have keys.
    """

    queued: jax.Array
    place: jax.Array
    refs: jax.Array
    key: jax.Array
    group: jax.Array
    rows: jax.Array
    lengths: jax.Array
    found: jax.Array
    hits: jax.Array
    listed: jax.Array

    @property
    def free(self) -> jax.Array:
        """Blocks in the queue."""
        return jnp.sum(self.queued)

    @property
    def cached(self) -> jax.Array:
        """bool[B], blocks with a key."""
        return self.key > 0

    def same(self, other: Picture) -> jax.Array:
        """True if everything that a log's `state` shows is equal."""
        names = ("queued", "place", "refs", "key", "group", "rows", "lengths")
        return jnp.all(jnp.stack([jnp.all(getattr(self, name) == getattr(other, name)) for name in names]))


def row_words(state: State, groups: int, field: Row) -> jax.Array:
    """int32[R, G]: one field of every request's row in every group."""
    requests = state.requests[:-1]
    return jnp.stack([requests[:, REQUEST_WORDS + GROUP_WORDS * g + int(field)] for g in range(groups)], axis=1)


def picture(space: Space, state: State) -> Picture:
    """Picture of a state, see `Picture`."""
    blocks, groups = space.config.num_blocks, len(space.config.topology.groups)
    table = np.asarray(of_config(space.config, space.buckets.groups).groups)  # the numbers that the rules read
    sizes, cacheable = table[:groups, GroupField.BLOCK], table[:groups, GroupField.CACHEABLE] != 0
    ids = np.arange(blocks)
    ring = state.queue.shape[0] - 1
    after_head = (np.arange(ring) - state.counters[Counter.HEAD]) & (ring - 1)
    live = after_head < state.counters[Counter.TAIL] - state.counters[Counter.HEAD]
    stands = (state.queue[None, :-1] == ids[:, None]) & live & (ids[:, None] > 0)
    queued = jnp.sum(stands, axis=1).astype(jnp.int32)
    raw = jnp.min(jnp.where(stands, after_head, FAR), axis=1)
    place = jnp.sum(raw[None, :] < raw[:, None], axis=1).astype(jnp.int32)
    key, column = primary(state.keys[:blocks, : 1 + space.buckets.parts], space.buckets.groups)
    group = jnp.full(blocks, -1)
    for number, member in enumerate(table[:groups, GroupField.MEMBER]):
        group = jnp.where((key > 0) & (column == number), int(member), group)
    lengths, first = row_words(state, groups, Row.LENGTH), row_words(state, groups, Row.FIRST)
    cells = state.rows[:-1, :groups]
    at = np.arange(cells.shape[2])
    held = (at >= jnp.where(table[:groups, GroupField.SINKS] > 0, 0, first)[:, :, None]) & (at < lengths[:, :, None])
    hits = jnp.maximum(state.requests[:-1, Request.HIT], 0)
    ends = -(-hits[:, None] // sizes) * cacheable
    start = jnp.minimum(row_words(state, groups, Row.HIT_FIRST), ends)
    given = (at >= start[:, :, None]) & (at < ends[:, :, None])
    return Picture(
        queued=queued,
        place=jnp.where(queued > 0, place, FAR),
        refs=jnp.maximum(-state.blocks[:blocks], 0),
        key=key,
        group=group.astype(jnp.int32),
        rows=jnp.where(held, cells, 0),
        lengths=lengths,
        found=jnp.where(given, cells, 0),
        hits=hits,
        listed=_listed(state, blocks),
    )


def _listed(state: State, blocks: int) -> jax.Array:
    """True if the key table and the blocks' keys agree.

    Every key of a block is in the table; every block that the table names has that key; and where several blocks have
    one key, each one's links lead on to another of them and back. A block's word says whether it has keys that end
    inside it.
    """
    table, groups = state.table.reshape(-1), state.table.shape[1]
    ids, named = np.arange(blocks), jnp.int32(0)
    parts = state.buckets.parts
    inside = jnp.any(state.keys[:blocks, 1 : 1 + parts] != 0, axis=1)
    right = jnp.all((state.keys[:blocks, 0] & PARTS != 0) == inside)
    for part in range(1 + parts):
        word = state.keys[:blocks, part]
        entry = (word >> 2) - 1 if part == 0 else word - 1
        known = entry >= 0
        value = jnp.where(known, table[jnp.clip(entry, 0, table.shape[0] - 1)], 0)
        twins = (entry[:, None] == entry) & known[:, None]
        several = jnp.sum(twins, axis=1) > 1
        after, before = state.links[:blocks, 2 * part], state.links[:blocks, 2 * part + 1]
        joined = jnp.any(twins & (after[:, None] == ids) & (before[None, :] == ids[:, None]), axis=1)
        apart = after != ids
        first = known & (value >> 3 == ids)
        named = named + jnp.sum(first)
        right = right & jnp.all(~known | ((value > 0) & ((value & 1 == 1) == several)))
        right = right & jnp.all(jnp.where(several, joined & apart, ~known | first))
    return right & (named == jnp.sum(state.table[:-1, : groups - 1] > 0))


def primary(keys: jax.Array, groups: int) -> tuple[jax.Array, jax.Array]:
    """Primary key of each block, as its string, 0 for none, and the key's column in the table.

    The primary key is that of the whole block, or else the one inside it that covers most tokens.

    Args:
      keys: int32[blocks, 1 + parts], as `State.keys`.
      groups: columns of the key table.
    """
    entry = (keys[:, 0] >> 2) - 1
    for part in range(1, keys.shape[1]):
        inside = keys[:, part] - 1
        whole = keys[:, 0] >> 2 != 0
        entry = jnp.where(~whole & (inside >= 0), inside, entry)
    known = entry >= 0
    return jnp.where(known, entry // groups, 0), jnp.where(known, entry % groups, -1)


def of_blocks(cells: jax.Array, values: jax.Array) -> jax.Array:
    """`values[cells]` by comparing: small, and vectorised over lanes where a gather is not."""
    ids = np.arange(values.shape[0])
    chosen = cells[..., None] == ids
    if values.dtype == jnp.bool_:
        return jnp.any(chosen & values, axis=-1)
    return jnp.sum(jnp.where(chosen, values, 0), axis=-1)


# One name for all states that differ only in what blocks and requests are called: 128 bits, computed on the device.
#
# Blocks are named in the order of the free queue, then in that of the rows; of the orders of the requests, the one
# whose digest is least counts. What no rule can tell apart is left out, and nothing else:
#
# * where in its ring the queue lies, how often something was counted, and which operation or step it was: of the step
#   only what was registered in it;
# * why a key has no block (`NEVER_SEEN`, `EVICTED`, ...), which only statistics read, and the bits that stand for it;
# * what a lookup found, once another operation followed; entries of rows that are not valid.
#
# A field that is added to `hkv.state.state` belongs to the name without a change here.
#
# Two different states have the same name with probability 2**-128; among n states some two with probability below
# (6 n)**2 / 2**129 with three requests: for a hundred million states 5e-22.

PASSING = {Counter.HEAD, Counter.TAIL, Counter.EVICTIONS, Counter.DROPPED, Counter.CLOCK, Counter.STEP}
"""Counters that a name leaves out."""

OF_THE_LOOKUP = {Request.HIT, Row.HIT_FIRST, Row.HIT_LENGTH}
"""Fields of a lookup's result."""

UNSAID = {Request.HIT_CLOCK, Request.GRANT_STEP, Request.WRITTEN, Request.JOINED, Row.NEW_FIRST}
"""Fields that a name leaves out: times, what only hits inside a block ask for, and what is only reported."""


def young(state: State) -> jax.Array:
    """bool[keys]: keys of states that were registered in this step."""
    return state.table[:-1, -1] == state.counters[Counter.STEP]


def name_of(space: Space, state: State, seen: Picture, ledger: jax.Array) -> jax.Array:
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
        numbers += [word & ~SHARED if part == 0 else word, several, known & (value > 0)]
        if part == 0:
            numbers.append(several & (word & SHARED == 0))
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

"""Picture of a state, read off the compiled cache's arrays without its rules. Of one state; `vmap` makes it many."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hkv.dialects.vllm.explorer.space import Space
from hkv.dialects.vllm.rules.parameters import GroupField, of_config
from hkv.state.key_table import PARTS
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
      found: int32[R, G, W], what the last lookup of a request found, likewise; only of use right after it.
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


class Columns(NamedTuple):
    """Columns of a space's key table.

    Attributes:
      members: group of each column, -1 for a column of none.
      blocks: tokens in a block of each group.
      cacheable: True if the group's blocks can be hit.
      sinks: blocks at the beginning of a group's rows that are never given back.
    """

    members: np.ndarray
    blocks: np.ndarray
    cacheable: np.ndarray
    sinks: np.ndarray


def columns(space: Space) -> Columns:
    """The key table's layout, from the same numbers that the rules read."""
    table = np.asarray(of_config(space.config, space.buckets.groups).groups)
    count = len(space.config.topology.groups)
    members = np.where(np.arange(len(table)) < count, table[:, GroupField.MEMBER], -1)
    return Columns(
        members,
        table[:count, GroupField.BLOCK],
        table[:count, GroupField.CACHEABLE] != 0,
        table[:count, GroupField.SINKS],
    )


def row_words(state: State, groups: int, field: Row) -> jax.Array:
    """int32[R, G]: one field of every request's row in every group."""
    requests = state.requests[:-1]
    return jnp.stack([requests[:, REQUEST_WORDS + GROUP_WORDS * g + int(field)] for g in range(groups)], axis=1)


def picture(space: Space, state: State) -> Picture:
    """Picture of a state, see `Picture`."""
    layout, blocks, groups = columns(space), space.config.num_blocks, len(space.config.topology.groups)
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
    for number, member in enumerate(layout.members):
        group = jnp.where((key > 0) & (column == number), int(member), group)
    lengths, first = row_words(state, groups, Row.LENGTH), row_words(state, groups, Row.FIRST)
    cells = state.rows[:-1, :groups]
    at = np.arange(cells.shape[2])
    held = (at >= jnp.where(layout.sinks > 0, 0, first)[:, :, None]) & (at < lengths[:, :, None])
    hits = jnp.maximum(state.requests[:-1, Request.HIT], 0)
    ends = -(-hits[:, None] // layout.blocks) * layout.cacheable
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

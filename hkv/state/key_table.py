"""The key table: from a prefix key and a group to the blocks that hold it, in the order in which they came.

Most keys have one block, which the table names itself. Where several blocks have the same key, a flag says so and the
rest hang in a ring of links, first registered first; only flagged keys ever touch the links. A block may have several
keys: one for its whole span (part 0), and some that end inside it (part p ends p hash blocks into it). Since all of them
lie on one chain, a key's part is known from the key.
"""

from __future__ import annotations

import jax.numpy as jnp

from hkv.state.events import Event, emit
from hkv.state.loops import Scalar, loop, peek, when
from hkv.state.workspace import Workspace

WRITES = ("keys", "table", "links", "events", "num_events")
"""What changing the table may write."""


def first_block(value: Scalar) -> Scalar:
    """The block that a positive value of the table names."""
    return value >> 3


def absent(value: Scalar) -> Scalar:
    """What the table says when the last block is gone that a positive value named."""
    return -1 - ((value >> 1) & 3)


def split(entry: Scalar, groups: int) -> tuple[Scalar, Scalar]:
    """The key and the column of an entry. `groups` is a power of two."""
    return entry >> (groups.bit_length() - 1), entry & (groups - 1)


def remove(work: Workspace, present: Scalar, block: Scalar, part: Scalar, entry: Scalar) -> Workspace:
    """Takes one key of a block out of the table, if `present`; `State.keys` of the block is not changed.

    Args:
      work: needs `table`, `links` and `events` to write.
      present: whether to do it.
      block: id of a block that is registered under the entry.
      part: which of the block's keys.
      entry: the key's place in the table.
    """
    groups = work.table.shape[2]
    key, column = split(entry, groups)
    work, (value, after, before) = peek(
        present,
        lambda w: (
            w.read("table", key, column),
            w.read("links", block, 2 * part),
            w.read("links", block, 2 * part + 1),
        ),
        work,
        reads=("table", "links"),
        default=(0, 0, 0),
    )

    def unlink(w: Workspace) -> Workspace:
        first = jnp.where(first_block(value) == block, after, first_block(value))
        shared = (value & 1) == 1
        remaining = first * 8 + (value & 6) + (after != before)
        w = w.write("table", jnp.where(shared, remaining, absent(value)), key, column)
        w = w.write_if(shared, "links", after, before, 2 * part)
        w = w.write_if(shared, "links", before, after, 2 * part + 1)
        return emit(w, present, Event.REMOVED, entry)

    return when(present, unlink, work, writes=("table", "links", "events", "num_events"))


def insert(work: Workspace, present: Scalar, block: Scalar, part: Scalar, entry: Scalar) -> Workspace:
    """Enters a block under a key, after those that have it already; `State.keys` of the block is not changed.

    Args:
      work: needs `table` and `links` to write.
      present: whether to do it.
      block: id of a block that is not registered under the entry.
      part: which of the block's keys it is.
      entry: the key's place in the table.
    """
    key, column = split(entry, work.table.shape[2])
    work, (value,) = peek(present, lambda w: (w.read("table", key, column),), work, reads=("table",), default=(0,))
    first = first_block(value)
    work, (last,) = peek(
        present & (value > 0),
        lambda w: (jnp.where((value & 1) == 1, w.read("links", first, 2 * part + 1), first),),
        work,
        reads=("links",),
        default=(0,),
    )

    def link(w: Workspace) -> Workspace:
        shared = value > 0
        w = w.write("table", jnp.where(shared, first * 8 + 1, block * 8), key, column)
        w = w.write_if(shared, "links", block, last, 2 * part)
        w = w.write_if(shared, "links", last, block, 2 * part + 1)
        w = w.write_if(shared, "links", first, block, 2 * part)
        return w.write_if(shared, "links", block, first, 2 * part + 1)

    return when(present, link, work, writes=("table", "links"))


def drop_keys(work: Workspace, present: Scalar, block: Scalar) -> Workspace:
    """Takes all keys of a block out of the table and off the block, if `present`.

    Args:
      work: needs `WRITES` to write.
      present: whether to do it.
      block: id of a block, with keys or without.
    """
    parts = work.keys.shape[2]

    def body(w: Workspace, local: tuple[Scalar]) -> tuple[Workspace, tuple[Scalar]]:
        (part,) = local
        w, (value,) = peek(part < parts, lambda v: (v.read("keys", block, part),), w, reads=("keys",), default=(0,))
        entry = jnp.where(part == 0, value >> 1, value) - 1
        w = remove(w, entry >= 0, block, part, jnp.maximum(entry, 0))
        return w.write("keys", 0, block, part), (part + 1,)

    return loop(lambda c: c[0] < parts, body, work, (jnp.where(present, 0, parts),), writes=WRITES)[0]


def add_key(work: Workspace, present: Scalar, block: Scalar, part: Scalar, entry: Scalar) -> Workspace:
    """Registers a block under a key, if `present`.

    Args:
      work: needs `WRITES` to write.
      present: whether to do it.
      block: id of a block that does not have the key.
      part: which of the block's keys it is; 0 for the key of the whole block.
      entry: the key's place in the table.
    """
    work = insert(work, present, block, part, entry)
    if work.keys.shape[2] == 1:
        return work.write_if(present, "keys", (entry + 1) * 2, block, 0)
    work, (value,) = peek(present, lambda w: (w.read("keys", block, 0),), work, reads=("keys",), default=(0,))
    whole = part == 0
    work = work.write_if(present, "keys", jnp.where(whole, (entry + 1) * 2, value | 1), block, 0)
    return work.write_if(present & ~whole, "keys", entry + 1, block, part)


def highest_part(work: Workspace, present: Scalar, block: Scalar) -> tuple[Workspace, Scalar]:
    """The part of the block's key that covers most tokens: 0 for the whole block's, p below it, -1 for no key.

    Args:
      work: needs `keys` to read.
      present: whether to look; -1 where not.
      block: id of a block.
    """
    parts = work.keys.shape[2]
    work, (value,) = peek(present, lambda w: (w.read("keys", block, 0),), work, reads=("keys",), default=(0,))

    def body(w: Workspace, local: tuple[Scalar, Scalar]) -> tuple[Workspace, tuple[Scalar, Scalar]]:
        part, _ = local
        found = w.read("keys", block, part) != 0
        return w, (jnp.where(found, part, part - 1), found)

    work, (part, _) = loop(
        lambda c: (c[0] > 0) & ~c[1],
        body,
        work,
        (jnp.where((value != 0) & (value >> 1 == 0), parts - 1, 0), False),
        reads=("keys",),
    )
    return work, jnp.where(value == 0, -1, part)

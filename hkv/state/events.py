"""Changes to keys, as operations report them: rows of four integers.

vLLM's `BlockPool` appends `BlockStored` and `BlockRemoved` objects to a list. In a compiled loop there are no lists: a
row goes to the next place of an array of fixed size, and a counter goes on when that is full, so that the host sees how
much was lost and can ask again with more room. Ids that operations report, and copies to be made, are kept in the same
way.
"""

from __future__ import annotations

import enum
from typing import Any

import jax.numpy as jnp

from hkv.state.loops import Scalar
from hkv.state.workspace import EVENT_WORDS, Workspace


class Event(enum.IntEnum):
    """The code of a row, and what its values are. The first integer is the code, plus 8 times the request's slot."""

    REMOVED = 1
    """A block lost a key: the entry; 0; 0."""
    KEY = 2
    """A block got a key: the entry; 0; 0. The span it belongs to follows."""
    STORED = 3
    """A span of blocks was looked at for registration: the group; its first block; the block after its last."""
    STORED_PART = 4
    """A key that ends inside a block was registered: the group; its first token; the token after its last."""
    CLEARED = 5
    """The prefix cache was reset."""


def emit(work: Workspace, condition: Scalar, code: Any, *values: Any) -> Workspace:
    """The workspace with an event added if the condition holds. Without room for events nothing is compiled."""
    room = work.sizes.events
    if room == 0:
        return work
    # Beyond its room an event goes to the spare row: the number goes on, so that the host sees that some were lost,
    # and asks again with more room.
    place = jnp.where(condition & (work.num_events < room), work.num_events, room)
    for i, value in enumerate((code, *values, *(0,) * (EVENT_WORDS - 1 - len(values)))):
        work = work.write("events", value, work.output("events", place) + i)
    return work.replace(num_events=work.num_events + condition)


def report(work: Workspace, condition: Scalar, block: Scalar) -> Workspace:
    """The workspace with a block id added to what operations report. Without room for ids nothing is compiled."""
    room = work.sizes.ids
    if room == 0:
        return work
    place = jnp.where(condition & (work.num_ids < room), work.num_ids, room)
    work = work.write("ids", block, work.output("ids", place))
    return work.replace(num_ids=work.num_ids + condition)


def note_copy(work: Workspace, condition: Scalar, group: Scalar, source: Scalar, target: Scalar) -> Workspace:
    """The workspace with a copy added to those that are to be made, and its three numbers to the ids it reports.

    Without room for copies and without room for ids, nothing is compiled.
    """
    values, room = (group, source, target), work.sizes.copies
    for value in values:
        work = report(work, condition, value)
    if room == 0:
        return work
    place = jnp.where(condition & (work.num_copies < room), work.num_copies, room)
    for i, value in enumerate(values):
        work = work.write("copies", value, work.output("copies", place) + i)
    return work.replace(num_copies=work.num_copies + condition)

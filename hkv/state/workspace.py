"""Workspace of a compiled operation: the arrays of one or more states, flat, one lane of them, and its counters.

Every index into the arrays is computed here and nowhere else: rules name fields, never offsets. The counters of the
lane at work are scalars that loops carry, so that XLA keeps them in registers.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Self

import jax
import jax.numpy as jnp

from hkv.state.flat_arrays import FlatArrays
from hkv.state.loops import Scalar
from hkv.state.state import GROUP_WORDS, REQUEST_WORDS, Buckets, Counter, Row, State

ARRAYS = tuple(field.name for field in dataclasses.fields(State) if field.name != "counters")
"""Names of the arrays that loops carry."""

OUTPUTS = ("ids", "events", "copies", "results")
"""Names of the outputs that loops carry as well."""

# Scalars while operations run: a counter that stayed in an array would be read and written in memory at each use.
COUNTERS = {
    "head": Counter.HEAD,
    "tail": Counter.TAIL,
    "free": Counter.FREE,
    "evictions": Counter.EVICTIONS,
    "dropped": Counter.DROPPED,
    "clock": Counter.CLOCK,
    "running": Counter.RUNNING,
    "steps": Counter.STEP,
}
"""Names of the counters that are scalars while operations run."""

EVENT_WORDS = 4
"""Integers of one event."""

COPY_WORDS = 3
"""Integers of one pending copy."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes: the buckets, and further ones.

    Attributes:
      buckets: sizes of one state.
      lanes: states.
      operations: operations a lane.
      width: integers of one operation's result.
      ids: room for block ids a lane; 0: none are reported.
      events: room for events a lane; 0: none are reported.
      copies: room for pending copies a lane; 0: none are noted, but reported as ids.
    """

    buckets: Buckets
    lanes: int
    operations: int
    width: int
    ids: int
    events: int
    copies: int = 0


@dataclasses.dataclass(frozen=True)
class Workspace(FlatArrays):
    """The arrays of `State`, lanes one after the other and flat, and what belongs to one lane of them.

    Attributes:
      sizes: static sizes.
      queue, blocks, keys, table, links, rows, chains, requests: as in `State`.
      ids: int32[lanes * (ids + 1)], block ids that operations report, one after the other.
      events: int32[lanes * (events + 1) * 4], what happened to keys (`Event`).
      copies: int32[lanes * (copies + 1) * 3], copies to be made: the group, the block, its copy.
      results: int32[lanes * (operations + 1) * width], one row an operation.
      lane: the lane that is worked on.
      head, tail, free, evictions, dropped, clock, running, steps: its counters (`Counter`).
      num_ids, num_events, num_copies: numbers of ids, events and copies; those beyond the capacity of `ids`, `events`
        and `copies` are counted, not written.
    """

    CARRIED = (*ARRAYS, *OUTPUTS)
    ROOMS = ("ids", "events", "copies")

    sizes: Sizes
    queue: jax.Array
    blocks: jax.Array
    keys: jax.Array
    table: jax.Array
    links: jax.Array
    rows: jax.Array
    chains: jax.Array
    requests: jax.Array
    ids: jax.Array
    events: jax.Array
    copies: jax.Array
    results: jax.Array
    head: Scalar
    tail: Scalar
    free: Scalar
    evictions: Scalar
    dropped: Scalar
    clock: Scalar
    running: Scalar
    steps: Scalar
    num_ids: Scalar
    num_events: Scalar
    num_copies: Scalar

    # Where things are.

    @property
    def mask(self) -> int:
        """The ring's size less 1."""
        return self.sizes.buckets.queue - 1

    def place(self, position: Scalar) -> Scalar:
        """Index into `queue` of a position in the ring, which may be any integer."""
        # The ring's size is a power of two: masking also brings a position below 0, which prepending makes, to its
        # place.
        return self._base(self.sizes.buckets.queue + 1) + (position & self.mask)

    def block(self, block: Any) -> Scalar:
        """Index into `blocks`."""
        return self._base(self.sizes.buckets.blocks + 1) + block

    def key(self, block: Any, part: Any = 0) -> Scalar:
        """Index into `keys` of one of a block's keys."""
        width = self.sizes.buckets.key_words
        return self._base((self.sizes.buckets.blocks + 1) * width) + block * width + part

    def written(self, block: Any) -> Scalar:
        """Index into `keys` of the step that registered a block before it was written; what was written follows."""
        return self.key(block, 1 + self.sizes.buckets.parts)

    def link(self, block: Scalar, part: Scalar, side: int) -> Scalar:
        """Index into `links` of the next (0) or previous (1) block with the same key."""
        width = 2 + 2 * self.sizes.buckets.parts
        return self._base((self.sizes.buckets.blocks + 1) * width) + block * width + 2 * part + side

    def entry(self, entry: Any) -> Scalar:
        """Index into `table` of an entry."""
        buckets = self.sizes.buckets
        return self._base((buckets.keys + 1) * buckets.groups) + entry

    @property
    def spare_entry(self) -> int:
        """An entry that belongs to no key."""
        return self.sizes.buckets.keys * self.sizes.buckets.groups

    def row(self, slot: Scalar, group: Scalar) -> Scalar:
        """Index into `rows` of a row's first entry."""
        buckets = self.sizes.buckets
        size = (buckets.requests + 1) * buckets.groups * buckets.row
        return self._base(size) + (slot * buckets.groups + group) * buckets.row

    def chain(self, slot: Scalar) -> Scalar:
        """Index into `chains` of a request's first key."""
        buckets = self.sizes.buckets
        return self._base((buckets.requests + 1) * buckets.chain) + slot * buckets.chain

    def row_field(self, slot: Scalar, group: Scalar, field: Row) -> Scalar:
        """Index into `requests` of a field of a request's row in a group."""
        return self._record(slot) + REQUEST_WORDS + group * GROUP_WORDS + int(field)

    def _record(self, slot: Scalar) -> Scalar:
        width = REQUEST_WORDS + GROUP_WORDS * self.sizes.buckets.groups
        return self._base((self.sizes.buckets.requests + 1) * width) + slot * width

    @property
    def spare_slot(self) -> int:
        """A slot that no request has."""
        return self.sizes.buckets.requests

    def output(self, name: str, place: Scalar) -> Scalar:
        """Index into `ids`, `events` or `copies` of their place-th item."""
        words = {"events": EVENT_WORDS, "copies": COPY_WORDS}.get(name, 1)
        room = getattr(self.sizes, name) + 1
        return self._base(room * words) + place * words

    def get_row(self, slot: Scalar, group: Scalar, *fields: Row) -> tuple[Scalar, ...]:
        """Fields of a request's row in a group."""
        return tuple(self.read("requests", self.row_field(slot, group, field)) for field in fields)

    def peek_row(self, present: Scalar, slot: Scalar, group: Scalar, *fields: Row) -> tuple[Self, tuple[Scalar, ...]]:
        """Fields of a request's row in a group, zeros unless `present` (`peek`)."""
        return self.peek(present, "requests", *(self.row_field(slot, group, field) for field in fields))

    def set_row(self, slot: Scalar, group: Scalar, field: Row, value: Any) -> Self:
        """The workspace with a field of a request's row in a group replaced."""
        return self.write("requests", value, self.row_field(slot, group, field))


# Changes to keys, ids that operations report, and copies to be made.
#
# vLLM's `BlockPool` appends `BlockStored` and `BlockRemoved` objects to a list. In a compiled loop there are no lists:
# a row goes to the next place of an array of fixed size, and a counter goes on when that is full, so that the host sees
# how much was lost and can ask again with more room.


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

"""What a compiled operation works on: the arrays of one or more states, one lane of them, and its counters as scalars."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp

from hkv.state import loops
from hkv.state.loops import Scalar
from hkv.state.state import GROUP_WORDS, REQUEST_WORDS, Counter, Request, Row, State

ARRAYS = tuple(field.name for field in dataclasses.fields(State) if field.name != "counters")
"""Names of the arrays that loops carry."""

OUTPUTS = ("ids", "events", "results")
"""Names of the outputs that loops carry as well."""

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


@dataclasses.dataclass(frozen=True)
class Workspace:
    """Arrays of `State`, each with a leading axis of lanes, and what belongs to one lane of them.

    Attributes:
      queue, blocks, keys, table, links, rows, chains, requests: as in `State`, int32[lanes, ...].
      ids: int32[lanes, capacity + 1], block ids that operations report, one after the other; capacity 0 for none.
      events: int32[lanes, capacity + 1, 4], what happened to keys, as `hkv.state.events` writes it; capacity 0 for none.
      results: int32[lanes, operations + 1, width], one row an operation.
      lane: the lane that is worked on.
      head, tail, free, evictions, dropped, clock, running, steps: its counters (`Counter`).
      num_ids, num_events: what has been written to `ids` and `events`; beyond capacity it is counted, not written.
    """

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
    results: jax.Array
    lane: Scalar
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

    def replace(self, **changes: Any) -> Self:
        """The workspace with some fields replaced."""
        return dataclasses.replace(self, **changes)

    def only(self, names: Sequence[str], values: Sequence[jax.Array]) -> Self:
        """The workspace as a loop's body sees it: arrays that are not named are absent."""
        absent = dict.fromkeys((*ARRAYS, *OUTPUTS))
        return dataclasses.replace(self, **{**absent, **dict(zip(names, values, strict=True))})

    def read(self, name: str, *index: Any) -> Scalar:
        """An element of the lane's array of that name."""
        return loops.read(self.array(name), self.lane, *index)

    def write(self, name: str, value: Any, *index: Any) -> Self:
        """The workspace with one element of the lane's array of that name replaced."""
        return self.replace(**{name: loops.write(self.array(name), value, self.lane, *index)})

    def write_if(self, condition: Scalar, name: str, value: Any, *index: Any) -> Self:
        """`write` where the condition holds; a write to the array's spare element where not."""
        spare = [size - 1 for size in self.array(name).shape[1:]]
        place = [jnp.where(condition, i, s) for i, s in zip(index, spare, strict=True)]
        return self.write(name, value, *place)

    def array(self, name: str) -> jax.Array:
        """The array of that name, which a loop's body must have asked for."""
        array = getattr(self, name)
        if array is None:
            raise LookupError(f"a loop uses {name}, which it does not name among its reads or writes")
        return array

    def request(self, slot: Scalar, field: Request) -> Scalar:
        """A field of a request."""
        return self.read("requests", slot, int(field))

    def set_request(self, slot: Scalar, field: Request, value: Any) -> Self:
        """The workspace with a field of a request replaced."""
        return self.write("requests", value, slot, int(field))

    def row(self, slot: Scalar, group: Scalar, field: Row) -> Scalar:
        """A field of a request's row in a group."""
        return self.read("requests", slot, REQUEST_WORDS + group * GROUP_WORDS + int(field))

    def set_row(self, slot: Scalar, group: Scalar, field: Row, value: Any) -> Self:
        """The workspace with a field of a request's row in a group replaced."""
        return self.write("requests", value, slot, REQUEST_WORDS + group * GROUP_WORDS + int(field))

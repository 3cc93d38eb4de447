"""Reading a compiled cache's arrays back into what logs say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.engines.published import describe_removed, describe_stored
from hkv.dialects.vllm.log.structs import CacheEvent, CacheState
from hkv.dialects.vllm.rules.parameters import GroupField, Parameters
from hkv.keys.chained import Interner, PrefixIdentity
from hkv.state.events import Event
from hkv.state.key_table import eviction_of
from hkv.state.state import (
    EVICTED,
    GROUP_WORDS,
    NEVER_SEEN,
    NOT_RETAINED,
    REQUEST_WORDS,
    RETIRED,
    Buckets,
    Counter,
    Request,
    Row,
    State,
    empty,
)

ABSENCE = {NEVER_SEEN: "never seen", EVICTED: "evicted", RETIRED: "retired", NOT_RETAINED: "not retained"}
"""Names of the reasons for which the table has no block for a key."""


class Teller(NamedTuple):
    """A request, as far as the events about it say.

    Attributes:
      tokens: prompt and output.
      numbers: its prefix keys, interned.
      identity: everything besides its tokens that identifies its prefix.
      session: its session, "" for none.
    """

    tokens: Sequence[int]
    numbers: Sequence[int]
    identity: PrefixIdentity
    session: str


class Span(NamedTuple):
    """Tokens of a request in one group, blocks of which are named by an event.

    Attributes:
      group: the group.
      block_size: tokens per block.
      start: first token; `end`: the token after the last.
      ends: of each block named, the token after its last.
    """

    group: int
    block_size: int
    start: int
    end: int
    ends: Sequence[int]


class Reader:
    """Translates entries of the key table, rows and the queue.

    Args:
      config: the configuration.
      parameters: the same as data, for the columns of its groups.
      interner: knows the keys' names.
      version: of the log format; version 1 names no keys in events.
    """

    def __init__(self, config: VllmConfig, parameters: Parameters, interner: Interner, version: int) -> None:
        self._config = config
        self._interner = interner
        self._version = version
        table = np.asarray(jax.device_get(parameters.groups))
        self._columns = table[:, GroupField.COLUMN].tolist()
        self._members = table[:, GroupField.MEMBER].tolist()
        self._sinks = table[:, GroupField.SINKS].tolist()
        self._width = len(table)

    def state(self, state: Any, slots: Mapping[str, int]) -> CacheState:
        """State of the cache, as far as engines are compared.

        Args:
          state: a `State` of NumPy arrays.
          slots: the request slot of each name.
        """
        counters, ring = state.counters, len(state.queue) - 1
        places = np.arange(counters[Counter.HEAD], counters[Counter.TAIL]) % ring
        queue = state.queue[places]
        counts = {str(block): int(-state.blocks[block]) for block in np.flatnonzero(state.blocks < 0)}
        rows = {name: self._rows(state, slot) for name, slot in slots.items()}
        return CacheState(
            free=queue[queue > 0].tolist(),
            refs=counts,
            rows={name: blocks for name, blocks in rows.items() if any(blocks)},
            cached=self._cached(state.keys, state.buckets.parts),
        )

    def _rows(self, state: Any, slot: int) -> list[list[int]]:
        rows = []
        for group in range(len(self._config.topology.groups)):
            base = REQUEST_WORDS + GROUP_WORDS * group
            length, first = (int(state.requests[slot, base + field]) for field in (Row.LENGTH, Row.FIRST))
            first = 0 if self._sinks[group] else min(first, length)
            rows.append([0] * first + state.rows[slot, group, first:length].tolist())
        return rows

    def _cached(self, keys: np.ndarray, parts: int) -> dict[str, tuple[int, int, str]]:
        cached = {}
        for block in np.flatnonzero(keys[:-1, 0]):
            entry = (int(keys[block, 0]) >> 2) - 1
            if entry < 0:
                entry = int(keys[block, np.flatnonzero(keys[block, 1 : 1 + parts])[-1] + 1]) - 1
            number, column = divmod(entry, self._width)
            tokens = (self._interner.places[number] + 1) * self._config.hash_block_size
            cached[str(block)] = (self._members[column], tokens, self._text(number))
        return cached

    def _text(self, number: int) -> str:
        key: Any = self._interner.keys[number]
        return key[:8].hex() if isinstance(key, bytes) else f"{key & (1 << 64) - 1:016x}"

    def absence(self, state: State, group: int, number: int) -> str:
        """State of a key in a group."""
        value = int(jax.device_get(state.table[number, self._columns[group]]))
        return "cached" if value > 0 else ABSENCE[EVICTED if value < NOT_RETAINED else value]

    def eviction(self, state: State, group: int, number: int) -> tuple[int, int] | None:
        """The step in which a key that is gone was evicted from a group, and the group that got its block."""
        value = int(jax.device_get(state.table[number, self._columns[group]]))
        return eviction_of(value, state.buckets.groups) if value < NOT_RETAINED else None

    def events(self, rows: np.ndarray, requests: Mapping[int, Teller]) -> list[CacheEvent]:
        """Events as logs write them.

        Args:
          rows: events that operations reported, int32[n, 4].
          requests: the request in each slot.
        """
        with_keys = self._version > 1
        found: list[CacheEvent] = []
        stored: list[int] = []
        for word, *values in rows.tolist():
            code, slot = word % 8, word // 8
            if code == Event.KEY:
                stored.append(values[0] // self._width)
            elif code == Event.REMOVED:
                number, column = divmod(values[0], self._width)
                keys = [self._text(number)] if with_keys else None
                removed = CacheEvent(type="removed", group=self._members[column], num_blocks=1, keys=keys)
                found.append(describe_removed(removed) if self._version > 2 else removed)
            elif code == Event.CLEARED:
                if with_keys:
                    found.append(CacheEvent(type="cleared"))
            else:
                found.append(self._stored(code, values, stored, requests[slot]))
                stored = []
        return found

    def _stored(self, code: int, values: Sequence[int], stored: Sequence[int], request: Teller) -> CacheEvent:
        group, start, end = values
        hash_block = self._config.hash_block_size
        size = self._config.block_size(group) if code == Event.STORED else hash_block
        if code == Event.STORED:
            start, end = start * size, end * size
        ends = [(self._interner.places[number] + 1) * hash_block for number in stored]
        return self.stored(Span(group, size, start, end, ends), request)

    def stored(self, span: Span, request: Teller) -> CacheEvent:
        """The event that says that a request stored the blocks of a span."""
        group, size, start, end, ends = span
        tokens, numbers, identity, session = request
        hash_block = self._config.hash_block_size
        event = CacheEvent(
            type="stored", group=group, num_blocks=len(ends), block_size=size, tokens=list(tokens[start:end])
        )
        if self._version > 1:
            event.keys = [self._text(numbers[end // hash_block - 1]) for end in ends]
            event.parent = self._text(numbers[start // hash_block - 1]) if start else ""
        if self._version > 2:
            ahead = [tokens[place : place + self._config.hash_lookahead] for place in ends]
            return describe_stored(event, self._config, identity, session, ends, ahead)
        return event


def resumed(state: State, slot: int, tokens: int, keys: int, prompt: int) -> State:
    """The same cache, but for a request's number of tokens, of prefix keys, and the length of its prompt.

    Nothing that was noted of its next allocation, or of its last lookup, holds.
    """
    changes = {Request.TOKENS: tokens, Request.KEYS: keys, Request.PROMPT: prompt, Request.CALM: 0, Request.HIT: -1}
    requests = np.array(jax.device_get(state.requests))
    for field, value in changes.items():
        requests[slot, field] = value
    return state.replace(requests=jax.device_put(requests))


def resized(state: State, buckets: Buckets) -> State:
    """The same cache in larger arrays, on the host. Blocks, groups, rows, chains and parts keep their sizes."""
    new = empty(buckets, 1)
    changes: dict[str, Any] = {}
    for name in ("table", "rows", "chains", "requests"):
        old, larger = getattr(state, name), np.array(getattr(new, name))
        larger[: len(old) - 1] = old[:-1]
        changes[name] = larger
    return state.replace(**changes)

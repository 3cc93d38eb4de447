"""Reading a compiled cache's arrays back into what logs say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from hkv.contract.events import DEVICE
from hkv.dialects.vllm.config import VllmConfig, finder_groups
from hkv.dialects.vllm.engines.engine import describe_stored
from hkv.dialects.vllm.engines.numpy import key_text
from hkv.dialects.vllm.log.structs import CacheEvent, CacheState, ConnectorHit, Hit, Offer, Offers
from hkv.dialects.vllm.rules.parameters import GroupField, Parameters
from hkv.errors import EngineFailure
from hkv.keys.chained import Interner, PrefixIdentity
from hkv.state.state import (
    GROUP_WORDS,
    REQUEST_WORDS,
    Buckets,
    Counter,
    Request,
    Row,
    State,
    empty,
)
from hkv.state.workspace import Event


class Teller(Protocol):
    """A request, as far as the events about it say: prompt and output, and its prefix keys, interned."""

    tokens: list[int]
    numbers: list[int]
    identity: PrefixIdentity
    session: str


class EventSpan(NamedTuple):
    """Tokens of a request in one group, blocks of which an event names: `ends`, the token after each one's last."""

    group: int
    block_size: int
    start: int
    end: int
    ends: Sequence[int]


class Reader:
    """Translates entries of the key table, rows and the queue."""

    def __init__(self, config: VllmConfig, parameters: Parameters, interner: Interner) -> None:
        self._config = config
        self._interner = interner
        table = np.asarray(jax.device_get(parameters.groups))
        self._members = table[:, GroupField.MEMBER].tolist()
        self._sinks = table[:, GroupField.SINKS].tolist()
        self._width = len(table)

    def state(self, state: Any, slots: Mapping[str, int]) -> CacheState:
        """State of the cache, as far as engines are compared; `slots` of requests by name."""
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
        return key_text(self._interner.keys[number])

    def events(self, rows: np.ndarray, requests: Mapping[int, Teller]) -> list[CacheEvent]:
        """Events as logs write them, of those that operations reported, int32[n, 4]; requests by slot."""
        found: list[CacheEvent] = []
        stored: list[int] = []
        for word, *values in rows.tolist():
            code, slot = word % 8, word // 8
            if code == Event.KEY:
                stored.append(values[0] // self._width)
            elif code == Event.REMOVED:
                number, column = divmod(values[0], self._width)
                group, keys = self._members[column], [self._text(number)]
                found.append(CacheEvent(type="removed", group=group, num_blocks=1, keys=keys, medium=DEVICE))
            elif code == Event.CLEARED:
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
        return self.stored(EventSpan(group, size, start, end, ends), request)

    def stored(self, span: EventSpan, request: Teller) -> CacheEvent:
        """The event that says that a request stored the blocks of a span."""
        group, size, start, end, ends = span
        tokens, numbers = request.tokens, request.numbers
        hash_block = self._config.hash_block_size
        event = CacheEvent(
            type="stored",
            group=group,
            num_blocks=len(ends),
            block_size=size,
            tokens=list(tokens[start:end]),
            keys=[self._text(numbers[end // hash_block - 1]) for end in ends],
            parent=self._text(numbers[start // hash_block - 1]) if start else "",
        )
        ahead = [tokens[place : place + self._config.hash_lookahead] for place in ends]
        return describe_stored(event, self._config, request.identity, request.session, ends, ahead)


def resumed(state: State, slot: int, tokens: int, keys: int, prompt: int) -> State:
    """The same cache, but for a request's number of tokens, of prefix keys, and the length of its prompt.

    Nothing that was noted of its next allocation, or of its last lookup, holds.
    """
    changes = {Request.TOKENS: tokens, Request.KEYS: keys, Request.PROMPT: prompt}
    changes |= {Request.NOOP_UNTIL: 0, Request.HIT: -1}
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


# Events of a compiled cache's hits, for requests whose hits are published (vLLM 0.33 `kv_cache_report_mode` `full`).
#
# A lookup changes nothing in the compiled cache; its answer says all that the events do.

BUG = "hit-reported-by-columns"


def spans_of(hit: Hit, config: VllmConfig, num_keys: int) -> Iterator[EventSpan]:
    """Spans of blocks that a hit consists of, one or two a group; `num_keys` are the request's prefix keys.

    Raises:
      EngineFailure: the defect, asked for by name, made the engine fail.
    """
    for group, row in enumerate(hit.blocks if hit.hit else ()):
        if row and BUG in config.bugs:
            yield _columns(group, len(row), config, num_keys)
        elif row:
            yield from _blocks(group, row, hit.hit, config)


def _blocks(group: int, row: list[int], hit: int, config: VllmConfig) -> Iterator[EventSpan]:
    """The whole blocks that are there, and the last hash block of one that the hit ends inside."""
    size, part = config.block_size(group), config.hash_block_size
    whole = hit // size
    ends = [size * (column + 1) for column, block in enumerate(row[:whole]) if block]
    if ends:
        yield EventSpan(group, size, 0, whole * size, ends)
    if hit > whole * size and row[whole]:
        yield EventSpan(group, part, hit - part, hit, [hit])


def _columns(group: int, columns: int, config: VllmConfig, num_keys: int) -> EventSpan:
    """Every column as a whole block of one rank, as vLLM has it."""
    size, part = config.topology.specs[group].block_size, config.hash_block_size
    if size % part:
        raise EngineFailure("block_size", size, f"a multiple of hash blocks of {part} tokens")
    if columns * size > num_keys * part:
        raise EngineFailure("keys", num_keys, f"those of {columns} columns")
    return EventSpan(group, size, 0, columns * size, [size * (column + 1) for column in range(columns)])


# States that a connector is offered, told from what operations of the compiled cache registered and copied.


class _State(NamedTuple):
    """A state of a request, and what its block was known by when it was registered."""

    id: str
    block: int
    entry: tuple[int, int, str]


class PendingOffers:
    """Offers that were not taken yet; `offered` are the groups whose states are.

    With `stale`, a state is offered that its block does not hold any more (defect offer-outlives-state).
    """

    def __init__(self, offered: Sequence[bool], block_sizes: Sequence[int], stale: bool) -> None:
        self._offered, self._sizes, self._stale = tuple(offered), tuple(block_sizes), stale
        self._offers: list[list[_State]] = [[] for _ in offered]
        self._tails: dict[tuple[str, int], _State] = {}

    def note(
        self, id: str, events: np.ndarray, copies: Iterable[Sequence[int]], request: np.ndarray, state: CacheState
    ) -> None:
        """Takes note of what one operation about a request did, `state` being the cache after it.

        `events` are its changes to keys, int32[n, 4] (`hkv.state.workspace.Event`), `copies` group, source and target
        of those that it left to the cache, `request` the request's words in the compiled cache's state.
        """
        for group, _, target in copies:
            tail = self._tails.pop((id, group), None)
            if tail is not None:
                self._offers[group].append(tail._replace(block=target))
        for word, group, start, end in events.tolist():
            if word % 8 == Event.STORED and self._offered[group]:
                blocks = [str(block) for block in state.rows[id][group][start:end]]
                known = [_State(id, int(block), state.cached[block]) for block in blocks if block in state.cached]
                self._offers[group] += known
            elif word % 8 == Event.STORED_PART and self._offered[group]:
                self._note_tail(id, group, end, request, state)

    def _note_tail(self, id: str, group: int, end: int, request: np.ndarray, state: CacheState) -> None:
        """A key that ends inside a block is the prompt's tail where the row notes that block as one to be copied."""
        column = int(request[REQUEST_WORDS + GROUP_WORDS * group + Row.PARTIAL]) - 1
        if column >= 0 and end % self._sizes[group]:
            block = state.rows[id][group][column]
            self._tails[id, group] = _State(id, block, state.cached[str(block)])

    def take(self, state: CacheState) -> Offers:
        """The offers, group by group; `state` is the cache now."""
        answer: Offers = {}
        for group, offers in enumerate(self._offers):
            for offer in offers:
                if self._is_good(offer, state):
                    answer.setdefault(offer.id, []).append((group, offer.block, offer.entry[1]))
            offers.clear()
        return answer

    def finalize(self, id: str, tokens: int, state: CacheState) -> list[Offer]:
        """The request's tails that are `tokens` long, as the cache is now; there are none of them after this."""
        tails = [(group, self._tails.pop((id, group), None)) for group in range(len(self._offered))]
        return [
            (group, tail.block, tokens)
            for group, tail in tails
            if tail is not None and tail.entry[1] == tokens and self._is_good(tail, state)
        ]

    def withdraw(self, id: str) -> None:
        """The request ends: nothing of it is offered any more."""
        for offers in self._offers:
            offers[:] = [offer for offer in offers if offer.id != id]
        for group in range(len(self._offered)):
            self._tails.pop((id, group), None)

    def _is_good(self, offer: _State, state: CacheState) -> bool:
        block = str(offer.block)
        return self._stale or (block in state.refs and state.cached.get(block) == offer.entry)


def connector_hit(config: VllmConfig, by_itself: Callable[[int], Hit], lookup: Callable[[], Hit]) -> ConnectorHit:
    """The hit of a request whose groups a connector may complete.

    `by_itself` looks the request up in the groups of one place of `finder_groups` alone, `lookup` in all together.
    """
    rows, hits = [[] for _ in config.topology.specs], [0] * len(config.topology.specs)
    for place, members in enumerate(finder_groups(config)):
        found = by_itself(place)
        for group in members:
            rows[group], hits[group] = found.blocks[group], found.hit
    full = config.completed_group
    if full is None or max(hits) > hits[full]:
        found = lookup()
        return ConnectorHit(found.hit, found.blocks, found.shared_prefix, False, hits)
    return ConnectorHit(hits[full], rows, 0, min(hits) < hits[full], hits)

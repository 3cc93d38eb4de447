"""The compiled cache as an engine: `hkv.dialects.sglang.machine` behind the operations of SGLang's logs.

The host makes numbers of pages: a page is its namespace, the page before it and its own units, and equal ones have the
same number. Each operation is a dispatch of its own; what is answered is read from the arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang import machine
from hkv.dialects.sglang.config import STRANDS_FULL
from hkv.dialects.sglang.engines import of_components, places, walk
from hkv.dialects.sglang.rules.operations import SGLangBatch, SGLangCode, SGLangColumn
from hkv.errors import ConfigError, OperationError
from hkv.machine.operations import bucket
from hkv.state.nodes import PRESENT, Node
from hkv.state.radix import (
    COUNT_WORDS,
    FULL,
    POOL_COUNT_WORDS,
    STATES,
    WINDOW,
    Held,
    Key,
    PoolCount,
    RadixNode,
    RadixState,
    resized_radix,
)
from hkv.state.status import Status

OPERATIONS, PAYLOAD = 2, 64
"""Least room for operations and for their keys in one dispatch."""

TOKENS = 250
"""Pages of a request that there is room for at first."""


@dataclasses.dataclass
class Request:
    """A request as the host knows it: its slot in the compiled cache, its tokens, and what they are cached apart by."""

    slot: int
    tokens: list[int]
    namespace: tuple[str | None, str | None]


@dataclasses.dataclass(eq=False)
class ReadNode:
    """A node as it is read from the arrays; `words` are its row."""

    words: np.ndarray
    parent: int
    tokens: list[int]
    namespace: tuple[str | None, str | None]
    slots: list[int]
    children: dict[int, ReadNode] = dataclasses.field(default_factory=dict)

    def word(self, field: RadixNode | Node) -> int:
        """A word of its row."""
        return int(self.words[field])


class Pages:
    """Numbers of pages, which are equal if namespace and all units up to their end are.

    Args:
      size: units of a page.
      bigrams: whether a unit is a token and the next one.
    """

    def __init__(self, size: int, *, bigrams: bool) -> None:
        self._size, self._bigrams = size, bigrams
        self._numbers: dict[tuple[Any, tuple[int, ...]], int] = {}
        self._known: list[tuple[Any, tuple[int, ...]]] = []

    def __len__(self) -> int:
        return len(self._known)

    def of(self, tokens: Sequence[int], namespace: tuple[str | None, str | None]) -> list[int]:
        """Numbers of the whole pages of some tokens."""
        before: Any = namespace
        found, whole = [], max(0, len(tokens) - self._bigrams) // self._size
        for page in range(whole):
            # Of bigrams the token after the page is the last one's second.
            own = tuple(tokens[page * self._size : (page + 1) * self._size + self._bigrams])
            before = self._numbers.setdefault((before, own), len(self._known))
            if before == len(self._known):
                self._known.append((found[-1] if found else namespace, own))
            found.append(before)
        return found

    def tokens(self, numbers: Sequence[int]) -> list[int]:
        """Tokens of pages that follow each other; of bigrams, the one after the last, too."""
        named = [self._known[number][1] for number in numbers]
        return [token for own in named for token in own[: self._size]] + list(named[-1][self._size :])

    def namespace(self, number: int) -> tuple[str | None, str | None]:
        """What a page is cached apart by."""
        before: Any = number
        while isinstance(before, int):
            before = self._known[before][0]
        return before


class SGLangJaxEngine:
    """The compiled cache under SGLang's rules.

    Args:
      header: the configuration, as a log's first line.

    Raises:
      ConfigError: a cache that SGLang does not have, or that has no compiled form.
    """

    def __init__(self, header: structs.Header) -> None:
        if header.tree:
            raise ConfigError("tree", True, "false: a tree alone, without pools, has no compiled form")
        self.header, self.config = header, structs.to_config(header)
        if self.config.window is not None and STRANDS_FULL not in self.config.bugs:
            raise ConfigError("bugs", header.bugs, f"{STRANDS_FULL} among them, which the compiled form always has")
        self._pages = Pages(self.config.page_size, bigrams=self.config.bigrams)
        self._requests: dict[str, Request] = {}
        self._buckets = machine.buckets_for(self.config, tokens=TOKENS * self.config.page_size)
        self._free_slots = list(range(self._buckets.requests))
        parameters, state = machine.init(self.config, self._buckets)
        self._parameters, self._state = jax.device_put((parameters, state))

    def perform(self, operation: structs.Operation) -> Any:
        """Performs one operation and returns its answer.

        Raises:
          OperationError: it cannot come now; nothing changed.
        """
        match operation:
            case structs.MatchOp():
                keys = self._keys(operation.tokens, operation.namespace)
                row = self._do(SGLangCode.MATCH, None, keys, tokens=len(operation.tokens))
                pages = np.asarray(self._state.keys)[keys[: row[SGLangColumn.HIT]], Key.PAGE]
                return self._found(row, pages)
            case structs.AdmitOp():
                return self._admit(operation)
            case structs.ExtendOp():
                return self._extend(self._request(operation.id), operation)
            case structs.DecodeOp():
                return self._decode(self._request(operation.id), operation)
            case structs.SlideOp():
                self._do(SGLangCode.SLIDE, self._request(operation.id), every=operation.every)
            case structs.CheckpointOp():
                request = self._request(operation.id)
                self._do(SGLangCode.CHECKPOINT, request)
                return structs.Row(self._row(request), self._held(request)[Held.PROTECTED] * self.config.page_size)
            case structs.ReleaseWindowOp():
                self._do(SGLangCode.RELEASE_WINDOW, self._request(operation.id))
            case structs.FinishOp(length=length) if length:
                raise OperationError("length", length, "0: a pass beyond a request's end has no compiled form")
            case structs.EventsOp():
                raise OperationError("op", "events", "an operation of the compiled cache, which tells nobody of pages")
            case structs.FinishOp() | structs.AbortOp():
                code = SGLangCode.FINISH if isinstance(operation, structs.FinishOp) else SGLangCode.ABORT
                request = self._request(operation.id)
                self._do(code, request)
                self._free_slots.insert(0, request.slot)
                del self._requests[operation.id]
            case structs.EvictOp():
                names = of_components(self.config, "full", "window", "states")
                wanted: dict[str, Any] = dict(zip(names, operation.tokens, strict=True))
                row = self._do(SGLangCode.EVICT, None, **wanted)
                columns = of_components(self.config, SGLangColumn.FULL, SGLangColumn.WINDOW, SGLangColumn.STATES)
                return structs.Freed([int(row[column]) for column in columns])
            case _:
                return self._told()
        return None

    # What operations become.

    def _admit(self, operation: structs.AdmitOp) -> structs.Found:
        tokens = list(operation.tokens)
        if operation.id in self._requests:
            raise OperationError("id", operation.id, "a name that no running request has")
        if not tokens:
            raise OperationError("tokens", tokens, "at least 1 token")
        self._fit(len(tokens))
        request = Request(self._slot(), tokens, operation.namespace)
        keys = self._keys(tokens, operation.namespace)
        row = self._do(SGLangCode.ADMIT, request, keys, tokens=len(tokens), priority=operation.priority)
        self._requests[operation.id] = request
        return self._found(row, np.asarray(self._state.rows)[request.slot, : row[SGLangColumn.HIT]])

    def _extend(self, request: Request, operation: structs.ExtendOp) -> structs.Slots:
        before = self._held(request)[Held.LENGTH]
        if not before < operation.length <= len(request.tokens):
            expected = f"from {before + 1} to {len(request.tokens)} tokens"
            raise OperationError("length", operation.length, expected)
        allowed = (Status.OK, Status.NO_ROOM)
        row = self._do(SGLangCode.EXTEND, request, allowed=allowed, length=operation.length, track=operation.track)
        granted = row[SGLangColumn.STATUS] == Status.OK
        return structs.Slots(self._row(request)[before:] if granted else None)

    def _decode(self, request: Request, operation: structs.DecodeOp) -> structs.Slots:
        if self._held(request)[Held.LENGTH] != len(request.tokens):
            raise OperationError("id", operation.id, "a request whose tokens all have slots")
        tokens = [*request.tokens, operation.token]
        self._fit(len(tokens))
        known = max(0, len(request.tokens) - self.config.bigrams) // self.config.page_size
        keys = self._keys(tokens, request.namespace)[known:]
        row = self._do(SGLangCode.DECODE, request, keys, allowed=(Status.OK, Status.NO_ROOM), track=operation.track)
        if row[SGLangColumn.STATUS] != Status.OK:
            return structs.Slots(None)
        request.tokens = tokens
        return structs.Slots(self._row(request)[-1:])

    def _do(
        self,
        code: SGLangCode,
        request: Request | None,
        keys: Sequence[int] = (),
        allowed: Sequence[Status] = (Status.OK,),
        **arguments: int,
    ) -> np.ndarray:
        """Performs one operation; its row of results."""
        batch = SGLangBatch().add(code, 0 if request is None else request.slot, keys, **arguments)
        self._state, results = machine.run(self._parameters, self._state, batch.build(OPERATIONS, PAYLOAD))
        row = np.asarray(results.table)[0]
        if row[SGLangColumn.STATUS] not in allowed:
            status = Status(int(row[SGLangColumn.STATUS])).name
            raise OperationError(code.name.lower(), status, "one that applies to the request's state")
        return row

    def _found(self, row: np.ndarray, pages: np.ndarray) -> structs.Found:
        hit, full = (int(row[column]) * self.config.page_size for column in (SGLangColumn.HIT, SGLangColumn.FULL))
        return structs.Found(hit, full, self._slots(pages))

    # Names and sizes.

    def _keys(self, tokens: Sequence[int], namespace: tuple[str | None, str | None]) -> list[int]:
        """Numbers of whole pages, which the compiled cache has room for."""
        found = self._pages.of(tokens, namespace)
        self._fit(len(tokens))
        self._resize(keys=bucket(len(self._pages), self._buckets.keys))
        return found

    def _request(self, id: str) -> Request:
        try:
            return self._requests[id]
        except KeyError:
            raise OperationError("id", id, "a request that runs") from None

    def _slot(self) -> int:
        if not self._free_slots:
            old = self._buckets.requests
            self._resize(requests=4 * old)
            self._free_slots += range(old, self._buckets.requests)
        return self._free_slots.pop(0)

    def _fit(self, tokens: int) -> None:
        self._resize(row=bucket(-(-tokens // self.config.page_size) + 1, self._buckets.row))

    def _resize(self, **sizes: int) -> None:
        buckets = dataclasses.replace(self._buckets, **sizes)
        if buckets != self._buckets:
            self._state = jax.device_put(resized_radix(jax.device_get(self._state), buckets))
            self._buckets = buckets

    # What the arrays say.

    def _held(self, request: Request) -> list[int]:
        return np.asarray(self._state.requests)[request.slot].tolist()

    def _row(self, request: Request) -> list[int]:
        """Full slots of a request's tokens."""
        length = self._held(request)[Held.LENGTH]
        pages = np.asarray(self._state.rows)[request.slot, : -(-length // self.config.page_size)]
        return self._slots(pages)[:length]

    def _slots(self, pages: np.ndarray) -> list[int]:
        size = self.config.page_size
        return (pages[:, None] * size + np.arange(size)).ravel().tolist()

    def _told(self) -> structs.State:
        """Everything, as far as engines are compared."""
        state = jax.device_get(self._state)
        config, rows, nodes = self.config, self._nodes(state), []
        root, *_ = rows.values()
        nodes = list(walk(root, lambda node: (node.namespace, node.tokens)))
        numbers = {id(node): number for number, node in enumerate(nodes)}
        rank = {row: numbers[id(node)] for row, node in rows.items() if row}
        used = places(node.word(Node.PLACE) for node in rows.values())
        made = places(node.word(RadixNode.MADE) for node in nodes)
        mapping = np.asarray(state.mapping)
        told = [
            structs.TreeNode(
                parent=rank.get(node.parent, -1),
                namespace=node.namespace,
                tokens=node.tokens,
                slots=node.slots,
                window=self._window(mapping, node.slots) if node.word(RadixNode.LIVE) else None,
                state=node.word(RadixNode.STATE) or None,
                locks=of_components(
                    config, *map(node.word, (RadixNode.LOCKS, RadixNode.WINDOW_LOCKS, RadixNode.STATE_LOCKS))
                ),
                mark=node.word(RadixNode.MARK) != 0,
                hits=node.word(RadixNode.HITS),
                priority=node.word(RadixNode.PRIORITY),
                used=used[node.word(Node.PLACE)],
                made=made[node.word(RadixNode.MADE)],
            )
            for node in nodes
        ]
        requests = {id: self._owned(request) for id, request in self._requests.items()}
        rings = of_components(config, RadixNode.OLDER, RadixNode.OLDER, RadixNode.STATE_OLDER)[1:]
        return structs.State(
            pools=[self._pool(state, pool) for pool in of_components(config, FULL, WINDOW, STATES)],
            window=self._mapped(mapping, requests) if config.window is not None else [],
            requests=requests,
            nodes=told,
            recent=[[rank[row] for row in _ring(state.nodes, field)] for field in rings],
        )

    def _nodes(self, state: RadixState) -> dict[int, ReadNode]:
        """Nodes by their rows, the root first, each among its parent's children."""
        rows, keys = np.asarray(state.nodes)[:-1], np.asarray(state.keys)
        found = {0: ReadNode(rows[0], -1, [], (None, None), [])}
        for row in np.flatnonzero(rows[:, Node.FLAGS] & PRESENT).tolist():
            if row == 0:
                continue
            words = rows[row]
            numbers = [int(words[RadixNode.FIRST])]
            for _ in range(words[RadixNode.END] - words[RadixNode.START] - 1):
                numbers.append(int(keys[numbers[-1], Key.NEXT]))
            found[row] = ReadNode(
                words,
                int(words[Node.PARENT]) - 1,
                self._pages.tokens(numbers),
                self._pages.namespace(numbers[0]),
                self._slots(keys[numbers, Key.PAGE]),
            )
        for row, node in found.items():
            if row:
                found[node.parent].children[row] = node
        return found

    def _owned(self, request: Request) -> structs.Owned:
        held, size = self._held(request), self.config.page_size
        states = [held[field] for field in (Held.STATE, Held.FIRST_TRACK, Held.SECOND_TRACK) if held[field]]
        return structs.Owned(
            self._row(request),
            held[Held.PROTECTED] * size,
            held[Held.ENTERED] * size,
            held[Held.SLID] * size,
            states,
            held[Held.TRACKED] or None,
        )

    def _pool(self, state: RadixState, pool: int) -> structs.Pool:
        words = np.asarray(state.counters)[COUNT_WORDS + POOL_COUNT_WORDS * pool :]
        ring = np.arange(words[PoolCount.FREE]) + words[PoolCount.FRONT]
        return structs.Pool(np.asarray(state.lists)[pool, ring % self._buckets.pages].tolist(), [])

    def _window(self, mapping: np.ndarray, slots: list[int]) -> list[int]:
        size = self.config.page_size
        return [int(mapping[slot // size]) * size + slot % size for slot in slots]

    def _mapped(self, mapping: np.ndarray, requests: dict[str, structs.Owned]) -> list[tuple[int, int]]:
        """Window slots of full ones. A page that a request has not filled has them only as far as its tokens go."""
        size, slots = self.config.page_size, set(self._slots(np.flatnonzero(mapping[:-1])))
        for owned in requests.values():
            last = owned.slots[-1] if owned.slots else -1
            slots -= set(range(last + 1, (last // size + 1) * size))
        return list(zip(sorted(slots), self._window(mapping, sorted(slots)), strict=True))


def _ring(nodes: np.ndarray, field: RadixNode) -> list[int]:
    """Rows of a ring of nodes, the one used last first."""
    found, row = [], int(nodes[0, field])
    while row:
        found.append(row)
        row = int(nodes[row, field])
    return found

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
from hkv.dialects.sglang.config import WINDOW_UNTOLD
from hkv.dialects.sglang.engines import of_components
from hkv.dialects.sglang.engines.jax_reading import SGLangReader, available, told_pages
from hkv.dialects.sglang.engines.pages import HostRequest, Pages
from hkv.dialects.sglang.rules.operations import SGLangBatch, SGLangCode, SGLangColumn
from hkv.errors import OperationError, UnsupportedConfigError
from hkv.machine.operations import bucket
from hkv.state.radix import FULL, POOLS, Count, Key, RadixRequest, resized
from hkv.state.status import Status

OPERATIONS, PAYLOAD = 2, 64
"""Least room for operations and for their keys in one dispatch."""

TOKENS = 250
"""Pages of a request that there is room for at first."""


class SGLangJaxEngine:
    """The compiled cache under SGLang's rules.

    Args:
      header: the configuration, as a log's first line.

    Raises:
      ConfigError: a cache that SGLang does not have, or that has no compiled form.
    """

    def __init__(self, header: structs.Header) -> None:
        if header.tree:
            raise UnsupportedConfigError("tree", True, "false: a tree alone, without pools, has no compiled form")
        self.header, self.config = header, structs.to_config(header)
        self._pages = Pages(self.config.page_size, bigrams=self.config.bigrams)
        self._reader = SGLangReader(self.config, self._pages)
        self._requests: dict[str, HostRequest] = {}
        self._buckets = machine.buckets_for(self.config, tokens=TOKENS * self.config.page_size)
        self._free_slots = list(range(self._buckets.requests))
        parameters, state = machine.init(self.config, self._buckets)
        self._parameters, self._state = jax.device_put((parameters, state))
        self._told = told_pages(state)

    @property
    def evictions(self) -> int:
        """Times that a node left, or lost what a component had of it, to make room."""
        return int(np.asarray(self._state.counters)[Count.EVICTIONS])

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
                return structs.Row(
                    self._reader.row(self._state, request.slot),
                    self._reader.held(self._state, request.slot)[RadixRequest.PROTECTED] * self.config.page_size,
                )
            case structs.ReleaseWindowOp():
                self._do(SGLangCode.RELEASE_WINDOW, self._request(operation.id))
            case structs.FinishOp():
                request = self._request(operation.id)
                held, size = self._reader.held(self._state, request.slot), self.config.page_size
                first, last = held[RadixRequest.PROTECTED] * size + self.config.bigrams, held[RadixRequest.LENGTH]
                if operation.length and not first <= operation.length <= last:
                    raise OperationError("length", operation.length, f"from {first} to {last} tokens")
                self._end(SGLangCode.FINISH, operation.id, operation.length)
            case structs.AbortOp():
                self._end(SGLangCode.ABORT, operation.id)
            case structs.EvictOp():
                names = of_components(self.config, "full", "window", "states")
                wanted: dict[str, Any] = dict(zip(names, operation.tokens, strict=True))
                row = self._do(SGLangCode.EVICT, None, **wanted)
                columns = of_components(self.config, SGLangColumn.FULL, SGLangColumn.WINDOW, SGLangColumn.STATES)
                return structs.Freed([int(row[column]) for column in columns])
            case structs.EventsOp():
                return self._events()
            case structs.RoomOp():
                self._do(SGLangCode.ROOM, None, full=operation.tokens)
                tokens = available(self._state) * [[self.config.page_size], [self.config.page_size], [1]]
                return structs.Room(*tokens[of_components(self.config, *POOLS)].T.tolist())
            case _:
                requests = {id: request.slot for id, request in self._requests.items()}
                return self._reader.state(jax.device_get(self._state), requests)
        return None

    def num_available(self) -> int:
        """Pages of all pools that are free or that nobody holds."""
        return int(available(self._state).sum())

    def _events(self) -> structs.Told:
        """Pages that came and left since the last time, as far as events tell of them."""
        now = told_pages(self._state)
        came, left = (now - self._told).tolist()
        self._told = now
        # SGLang's events tell of full attention alone.
        told = [pool == FULL or WINDOW_UNTOLD not in self.config.bugs for pool in POOLS]
        shown = of_components(self.config, *POOLS)
        return structs.Told(*([counts[pool] if told[pool] else 0 for pool in shown] for counts in (came, left)))

    # What operations become.

    def _admit(self, operation: structs.AdmitOp) -> structs.Found:
        tokens = list(operation.tokens)
        if operation.id in self._requests:
            raise OperationError("id", operation.id, "a name that no running request has")
        if not tokens:
            raise OperationError("tokens", tokens, "at least 1 token")
        self._fit(len(tokens))
        request = HostRequest(self._slot(), tokens, operation.namespace)
        keys = self._keys(tokens, operation.namespace)
        try:
            row = self._do(SGLangCode.ADMIT, request, keys, tokens=len(tokens), priority=operation.priority)
        except OperationError:
            self._free_slots.insert(0, request.slot)
            raise
        self._requests[operation.id] = request
        return self._found(row, np.asarray(self._state.rows)[request.slot, : row[SGLangColumn.HIT]])

    def _extend(self, request: HostRequest, operation: structs.ExtendOp) -> structs.Slots:
        before = self._reader.held(self._state, request.slot)[RadixRequest.LENGTH]
        if not before < operation.length <= len(request.tokens):
            expected = f"from {before + 1} to {len(request.tokens)} tokens"
            raise OperationError("length", operation.length, expected)
        if operation.track and not before < operation.track <= operation.length:
            raise OperationError("track", operation.track, f"0, or from {before + 1} to {operation.length} tokens")
        allowed = (Status.OK, Status.NO_ROOM)
        row = self._do(SGLangCode.EXTEND, request, allowed=allowed, length=operation.length, track=operation.track)
        granted = row[SGLangColumn.STATUS] == Status.OK
        return structs.Slots(self._reader.row(self._state, request.slot)[before:] if granted else None)

    def _decode(self, request: HostRequest, operation: structs.DecodeOp) -> structs.Slots:
        if self._reader.held(self._state, request.slot)[RadixRequest.LENGTH] != len(request.tokens):
            raise OperationError("id", operation.id, "a request whose tokens all have slots")
        tokens = [*request.tokens, operation.token]
        self._fit(len(tokens))
        known = max(0, len(request.tokens) - self.config.bigrams) // self.config.page_size
        keys = self._keys(tokens, request.namespace)[known:]
        row = self._do(SGLangCode.DECODE, request, keys, allowed=(Status.OK, Status.NO_ROOM), track=operation.track)
        if row[SGLangColumn.STATUS] != Status.OK:
            return structs.Slots(None)
        request.tokens = tokens
        return structs.Slots(self._reader.row(self._state, request.slot)[-1:])

    def _end(self, code: SGLangCode, id: str, length: int = 0) -> None:
        request = self._request(id)
        self._do(code, request, length=length)
        self._free_slots.insert(0, request.slot)
        del self._requests[id]

    def _do(
        self,
        code: SGLangCode,
        request: HostRequest | None,
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
        return structs.Found(hit, full, self._reader.slots(pages))

    # Names and sizes.

    def _keys(self, tokens: Sequence[int], namespace: tuple[str | None, str | None]) -> list[int]:
        """Numbers of whole pages, which the compiled cache has room for."""
        found = self._pages.of(tokens, namespace)
        self._fit(len(tokens))
        self._resize(keys=bucket(len(self._pages), self._buckets.keys))
        return found

    def _request(self, id: str) -> HostRequest:
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
            self._state = jax.device_put(resized(jax.device_get(self._state), buckets))
            self._buckets = buckets

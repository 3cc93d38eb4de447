"""Operations of the compiled cache, many a dispatch, and the arrays that grow with requests and keys."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from hkv.dialects.vllm import machine as cache
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.engines import jax_reading as reading
from hkv.dialects.vllm.engines.jax_answers import check
from hkv.dialects.vllm.engines.jax_requests import Later, Request, Room
from hkv.dialects.vllm.rules.operations import Batch, Code
from hkv.dialects.vllm.rules.parameters import CacheField, GroupField, Parameters
from hkv.machine.operations import bucket
from hkv.state.state import Buckets

IDS, EVENTS = 4096, 4096
"""Least room for block ids and for events in the results of one dispatch."""

SLOTS, KEYS = 32, 4096
"""Least room for requests and for distinct prefix keys."""

PAYLOAD = 1024
"""Least room for the prefix keys that one dispatch brings."""

OPERATIONS = 64
"""Least room for operations in one dispatch."""

CODES = tuple(code for code in cache.ALL if code != Code.FORK)
"""Operations that logs know."""


class Dispatcher:
    """The compiled cache's state, and the operations that wait for the next dispatch.

    Args:
      config: the configuration.
      done: takes what was performed and its changes, int32[n, 4], after each dispatch.

    Attributes:
      parameters: the configuration on the device.
      state: the cache, as of the last dispatch.
      buckets: sizes of the state's arrays.
    """

    def __init__(self, config: VllmConfig, done: Callable[[Sequence[Later], np.ndarray], None]) -> None:
        self._done = done
        self.buckets = cache.buckets_for(config, requests=SLOTS, keys=KEYS)
        self._free_slots = list(range(self.buckets.requests))
        self._left_slots: list[int] = []
        self.parameters, self.state = jax.device_put(cache.init(config, self.buckets))
        self._batch = Batch()
        self._waiting: list[Later] = []
        self._room = Room(0, 0)

    def add(
        self,
        code: Code,
        request: Request | None,
        payload: Sequence[int],
        room: Room | None,
        read: Any,
        **arguments: int,
    ) -> Later:
        """Adds an operation; dispatches those before it first if there is no room for it beside them.

        Args:
          code: what it is.
          request: whose; None for none.
          payload: numbers that it brings.
          room: block ids and events that it may answer.
          read: takes its row of the results and the block ids; None where it only succeeds or fails.
          arguments: columns of the operation.
        """
        room = room or Room(0, 0)
        full = len(self._batch) >= OPERATIONS - 1 or self._batch.payload_size + len(payload) > PAYLOAD
        if len(self._batch) and (full or self._room.ids + room.ids > IDS or self._room.events + room.events > EVENTS):
            self.flush()
        self._room = Room(self._room.ids + room.ids, self._room.events + room.events)
        later = Later(read, request, code)
        self._batch.add(code, 0 if request is None else request.slot, payload, **arguments)
        self._waiting.append(later)
        return later

    def flush(self) -> None:
        """Performs everything that waits, in one dispatch."""
        if not len(self._batch):
            return
        batch, waiting, room = self._batch, self._waiting, self._room
        self._batch, self._waiting, self._room = Batch(), [], Room(0, 0)
        operations = jax.device_put(batch.build(OPERATIONS, PAYLOAD))
        ids, events = bucket(room.ids, IDS), bucket(room.events, EVENTS)
        self.state, results = cache.run(self.parameters, self.state, operations, ids=ids, events=events, only=CODES)
        results = jax.device_get(results)
        self._free_slots += self._left_slots
        self._left_slots.clear()
        for later, row in zip(waiting, results.table, strict=False):
            if later.read is None:
                check(row)
            else:
                later.value = later.read(row, results.ids)
        self._done(waiting, np.asarray(results.events)[: int(results.counts[1])])

    @contextlib.contextmanager
    def searching(self, place: int) -> Iterator[None]:
        """Within it, lookups are of the groups that are looked up together as the one of that place, by themselves."""
        self.flush()
        every, groups = self.parameters, np.asarray(self.parameters.groups).copy()
        cache = np.asarray(every.cache).copy()
        for field in (GroupField.FINDER_FIRST, GroupField.FINDER_COUNT):
            groups[0, field] = groups[place, field]
        cache[CacheField.FINDERS] = cache[CacheField.SINGLE_PASS] = 1
        self.parameters = jax.device_put(Parameters(cache=cache, groups=groups))  # type: ignore[arg-type]
        try:
            yield
            self.flush()
        finally:
            self.parameters = every

    def slot(self) -> int:
        """A row for a request that arrives."""
        if not self._free_slots:
            self.flush()
        if not self._free_slots:
            old = self.buckets.requests
            self._resize(dataclasses.replace(self.buckets, requests=4 * old))
            self._free_slots += range(old, self.buckets.requests)
        return self._free_slots.pop(0)

    def leave(self, slot: int) -> None:
        """The row may be given to another request after the next dispatch."""
        self._left_slots.append(slot)

    def fit_keys(self, count: int) -> None:
        """Makes room for `count` distinct keys."""
        keys = bucket(count, self.buckets.keys)
        if keys > self.buckets.keys:
            self._resize(dataclasses.replace(self.buckets, keys=keys))

    def _resize(self, buckets: Buckets) -> None:
        self.flush()
        self.state = jax.device_put(reading.resized(jax.device_get(self.state), buckets))
        self.buckets = buckets

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
from hkv.dialects.vllm.engines.numpy import identity_of
from hkv.dialects.vllm.log.structs import AllocateOp, Allocation, Hit, Reset, ResumeOp, Rows
from hkv.dialects.vllm.rules.operations import RESULT_FRONT, Batch, Code, Column, Flag
from hkv.dialects.vllm.rules.parameters import CacheField, GroupField, Parameters
from hkv.errors import EngineFailure, OperationError
from hkv.keys.chained import PLAIN, GivenKeys, KeyChain, PrefixIdentity
from hkv.machine.operations import bucket
from hkv.state.state import Buckets
from hkv.state.status import Status

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


@dataclasses.dataclass(frozen=True)
class Room:
    """Room that answers need in the results of a dispatch: block ids and events."""

    ids: int
    events: int


NO_ROOM = Room(0, 0)


class Dispatcher:
    """The compiled cache's state as of the last dispatch, and the operations that wait for the next.

    `done` takes what was performed and its changes, int32[n, 4], after each dispatch.
    """

    def __init__(self, config: VllmConfig, done: Callable[[Sequence[Later], np.ndarray], None]) -> None:
        self._done = done
        self.buckets = cache.buckets_for(config, requests=SLOTS, keys=KEYS)
        self._free_slots = list(range(self.buckets.requests))
        self._left_slots: list[int] = []
        self.parameters, self.state = jax.device_put(cache.init(config, self.buckets))
        self._batch = Batch()
        self._waiting: list[Later] = []
        self._room = NO_ROOM

    def add(
        self,
        code: Code,
        request: BatchedRequest | None,
        payload: Sequence[int] = (),
        room: Room = NO_ROOM,
        read: Any = None,
        **arguments: int,
    ) -> Later:
        """Adds an operation; dispatches those before it first if there is no room for it with them.

        `read` takes its row of the results and the block ids; None where it only succeeds or fails.
        """
        full = len(self._batch) >= OPERATIONS - 1 or self._batch.payload_size + len(payload) > PAYLOAD
        if len(self._batch) and (full or self._room.ids + room.ids > IDS or self._room.events + room.events > EVENTS):
            self.flush()
        self._room = Room(self._room.ids + room.ids, self._room.events + room.events)
        later = Later(read, request)
        self._batch.add(code, 0 if request is None else request.slot, payload, **arguments)
        self._waiting.append(later)
        return later

    def flush(self) -> None:
        """Performs everything that waits, in one dispatch."""
        if not len(self._batch):
            return
        batch, waiting, room = self._batch, self._waiting, self._room
        self._batch, self._waiting, self._room = Batch(), [], NO_ROOM
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


# Answers of vLLM 0.33's operations, read off what a dispatch of the compiled cache gave.

REFUSALS = (Status.NO_ROOM, Status.NO_ROOM_FOR_SEQUENCE, Status.NOT_YET_WRITTEN)
"""Statuses with which an allocation may be refused without anything being wrong."""


class Answers:
    """Reads an operation's row of results, and keeps what allocations queued: copies, and blocks to be zeroed.

    Attributes:
      pending_copies: group, source and target of copies that were not taken yet.
      zeros: of each group, the blocks that are to be zeroed.
    """

    def __init__(self, zeroed: Sequence[bool]) -> None:
        self._groups, self._zeroed = len(zeroed), tuple(zeroed)
        self.pending_copies: list[list[int]] = []
        self.zeros: list[list[int]] = [[] for _ in zeroed]

    def take_copies(self) -> list[list[int]]:
        """Group, source and target of the copies that were queued since they were last taken."""
        copies, self.pending_copies = self.pending_copies, []
        return copies

    def hit(self, row: np.ndarray, ids: np.ndarray) -> Hit:
        """Answer to a lookup."""
        if row[Column.STATUS] == Status.ENGINE_FAILURE:
            raise EngineFailure("keys", Status.ENGINE_FAILURE.name, "a key for every block up to the last token")
        check(row)
        blocks = self._rows(row, ids, leading=True)
        return Hit(int(row[Column.VALUE]), blocks, int(row[Column.SHARED_PREFIX]))

    def allocation(self, row: np.ndarray, ids: np.ndarray) -> Allocation:
        """New blocks by group, or a refusal."""
        if row[Column.STATUS] in REFUSALS:
            return Allocation(None)
        check(row)
        count, place = int(row[Column.COPIES]), int(row[Column.IDS])
        copies = ids[place : place + 3 * count].reshape(-1, 3).tolist()
        self.pending_copies += copies
        blocks = self._rows(row, ids, leading=False)
        for group, _, target in copies if row[Column.VALUE] else ():
            blocks[group].insert(0, target)
        for zeroed, zeros, new in zip(self._zeroed, self.zeros, blocks, strict=True):
            zeros += new if zeroed else []
        return Allocation(blocks)

    def take_zeros(self) -> list[int]:
        """The blocks that are to be zeroed, group by group, since they were last taken."""
        zeros, self.zeros = self.zeros, [[] for _ in self._zeroed]
        return [block for blocks in zeros for block in blocks]

    def zero_loaded(
        self, rows: Rows, starts: Sequence[int], before: Sequence[int], blocks: Rows, loaded: Sequence[int]
    ) -> None:
        """Enters the blocks that an allocation took for tokens from elsewhere, which its answer `blocks` leaves out.

        Of each group, `starts` has the columns of the hit that it adopted, `before` the number of blocks that were to
        be zeroed before it; `rows` are the request's after it, and a load writes the blocks of the groups `loaded`.
        """
        for group, row in enumerate(rows):
            if self._zeroed[group] and group not in loaded:
                own = set(blocks[group])
                external = [block for block in row[starts[group] :] if block and block not in own]
                self.zeros[group][before[group] : before[group]] = external

    def zero_row(self, rows: Rows, starts: Sequence[int]) -> None:
        """Enters the blocks of a request's rows from these columns on."""
        for group, row in enumerate(rows):
            self.zeros[group] += row[starts[group] :] if self._zeroed[group] else []

    @staticmethod
    def reset(row: np.ndarray, ids: np.ndarray) -> Reset:
        """True if the prefix cache was reset."""
        del ids
        if row[Column.STATUS] != Status.IN_USE:
            check(row)
        return Reset(bool(row[Column.VALUE]))

    def _rows(self, row: np.ndarray, ids: np.ndarray, leading: bool) -> list[list[int]]:
        place, rows = int(row[Column.IDS]) + 3 * int(row[Column.COPIES]), []
        for group in range(self._groups):
            start, end = (int(row[RESULT_FRONT + 2 * group + side]) for side in (0, 1))
            rows.append([0] * (start if leading else 0) + ids[place : place + end - start].tolist())
            place += end - start
        return rows


def check(row: np.ndarray) -> None:
    """Raises what a row's status stands for.

    Raises:
      EngineFailure: the engine itself fails here, as vLLM would.
      OperationError: the operation does not apply.
    """
    status = Status(int(row[Column.STATUS]))
    if status == Status.ENGINE_FAILURE:
        raise EngineFailure("blocks", status.name, "as many free blocks as the estimate said")
    if status != Status.OK:
        raise OperationError("operation", status.name, "one that applies to the request's state")


# Requests of the compiled cache as the host knows them, and answers that come with the next dispatch.


@dataclasses.dataclass
class BatchedRequest:
    """A request as the host knows it.

    Attributes:
      num_tokens: prompt and output.
      chain: computes its prefix keys.
      numbers: its prefix keys, interned.
      session: the session that its events name, "" for none.
      reports: whether its hits are published as events.
    """

    slot: int
    num_tokens: int
    tokens: list[int]
    chain: KeyChain | GivenKeys
    numbers: list[int]
    identity: PrefixIdentity = PLAIN
    session: str = ""
    reports: bool = False

    def check_resumption(self, operation: ResumeOp, max_model_len: int) -> None:
        """Makes sure that a streaming session can go on so.

        Raises:
          OperationError: more tokens than it has, or may have; a longer prompt; keys where they are computed.
        """
        if not 0 <= operation.keep <= self.num_tokens:
            raise OperationError("keep", operation.keep, f"at most the request's {self.num_tokens} tokens")
        length = operation.keep + len(operation.tokens)
        if length > max_model_len:
            raise OperationError("tokens", length, f"at most max_model_len {max_model_len} in all")
        if not 1 <= operation.prompt <= length:
            raise OperationError("prompt", operation.prompt, f"1 to {length} tokens")
        if operation.keys and not isinstance(self.chain, GivenKeys):
            raise OperationError("keys", operation.keys, "none: this request's are computed")

    def cut(self, operation: ResumeOp, hash_block_size: int) -> None:
        """Leaves the tokens and keys that stay when a streaming session goes on, and adds the tokens that follow."""
        identity = None if operation.extra is None else identity_of(operation.extra)
        self.chain.cut(operation.keep, hash_block_size, identity)
        if isinstance(self.chain, GivenKeys):
            self.chain.give(operation.keys or ())
        self.identity = self.identity if identity is None else identity
        del self.numbers[operation.keep // hash_block_size :]
        self.tokens[operation.keep :] = operation.tokens
        self.num_tokens = len(self.tokens)


def said(operation: AllocateOp) -> Flag:
    """Flags of what an allocation says of its request's status, and of others."""
    flags = Flag(0)
    if operation.waiting is not None:
        flags |= Flag.STATUS | (Flag.WAITING if operation.waiting else Flag(0))
    if operation.scheduled is not None:
        flags |= Flag.OTHERS | (Flag.SCHEDULED if operation.scheduled else Flag(0))
    return flags


@dataclasses.dataclass
class Later:
    """An answer that comes with the next dispatch."""

    read: Any
    request: BatchedRequest | None
    value: Any = None

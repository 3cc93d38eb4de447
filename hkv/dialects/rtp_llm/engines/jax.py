"""The compiled cache under RTP-LLM's rules as an engine: the machine behind the operations of its logs."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm import machine as rtp_cache
from hkv.dialects.rtp_llm.bugs import FORGETS_ALIGNMENT, KEEPS_FREED_LISTS
from hkv.dialects.rtp_llm.config import SINGLE
from hkv.dialects.rtp_llm.engines.engine import check_unused, taken
from hkv.dialects.rtp_llm.engines.jax_reading import RtpReader
from hkv.dialects.rtp_llm.log import to_rtp_config
from hkv.dialects.rtp_llm.rules.operations import RtpBatch, RtpCode, RtpColumn
from hkv.errors import OperationError
from hkv.keys.chained import Interner
from hkv.keys.rolling import RollingKeys, first_keys, next_keys
from hkv.machine.operations import bucket
from hkv.state.pooled import Counter, Role, resized
from hkv.state.status import Status

BLOCKS = 100
"""Least room for blocks of a sequence in one group."""

OPERATIONS, PAYLOAD, IDS = 16, 1024, 1024
"""Least room for operations, for their payload and for ids in one dispatch."""

VERDICTS = {
    Status.OK: "granted",
    Status.NO_ROOM_FOR_SEQUENCE: "permanent",
    Status.NO_ROOM: "retryable",
    Status.NOT_EVICTABLE: "internal_error",
}
"""Names in logs of what an allocation answers."""


@dataclasses.dataclass
class HostRequest:
    """A request as the host knows it.

    Attributes:
      slot: its request slot in the compiled cache.
      length: tokens of each sequence.
      tokens: the tokens of each sequence.
      chains: for each sequence, the keys of all its whole blocks.
      keys: for each sequence, the keys in use, that of a partly filled block among them.
    """

    slot: int
    length: int
    tokens: list[list[int]]
    chains: list[RollingKeys]
    keys: list[RollingKeys]


class RtpJaxEngine:
    """The compiled cache under RTP-LLM's rules. Implements `hkv.dialects.rtp_llm.engines.engine.RtpEngine`.

    Raises:
      HKVError: a configuration the dialect forbids.
    """

    def __init__(self, header: structs.RtpHeader) -> None:
        self.config = to_rtp_config(header)
        self._interner = Interner()
        self._requests: dict[str, HostRequest] = {}
        self._held: dict[str, tuple[Role, list[int]]] = {}
        self._exported: dict[str, list[int]] = {}
        self._buckets = rtp_cache.buckets_for(self.config, tokens=BLOCKS * self.config.block_size)
        self._free_slots = list(range(self._buckets.requests))
        parameters, state = rtp_cache.init(self.config, self._buckets)
        self._parameters, self._state = jax.device_put((parameters, state))
        self._reader = RtpReader(self.config)

    def perform(self, operation: structs.RtpOp) -> structs.RtpAnswer:
        match operation:
            case structs.RequestOp():
                self._arrive(operation)
            case structs.MallocOp():
                return self._malloc(operation)
            case structs.AppendOp():
                self._append(operation)
            case structs.InsertOp():
                self._insert(operation)
            case structs.ForkOp():
                return self._fork(operation)
            case structs.FreeOp():
                self._free(self._request(operation.id))
            case structs.DropOp():
                self._drop(operation.id)
            case structs.HoldOp():
                return self._hold(operation)
            case structs.ReleaseOp():
                role, pairs = taken(self._held, operation.name)
                self._do(RtpCode.RELEASE, None, pairs, role=int(role))
            case structs.ExportOp():
                return self._export(operation)
            case structs.SettleOp():
                self._do(RtpCode.RELEASE, None, taken(self._exported, operation.name), role=int(Role.CACHE))
            case structs.EvictOp():
                row, _ = self._do(RtpCode.EVICT, None, least=operation.least)
                return structs.Count(int(row[RtpColumn.VALUE]))
            case structs.PeakOp():
                return self._peak(operation)
            case structs.StateOp():
                return self.state()
        return None

    @property
    def evictions(self) -> int:
        """Blocks that were evicted so far."""
        return int(jax.device_get(self._state.counters)[Counter.EVICTIONS])

    def state(self) -> structs.RtpState:
        """State of the cache, as far as engines are compared."""
        slots = {id: request.slot for id, request in self._requests.items()}
        return self._reader.state(jax.device_get(self._state), slots, self._interner.keys)

    # What operations become.

    def _arrive(self, operation: structs.RequestOp) -> None:
        self._check_new(operation.id, len(operation.tokens), operation.sequences, operation.reserve)
        tokens = [list(operation.tokens) for _ in range(operation.sequences)]
        nothing = [[RollingKeys() for _ in tokens] for _ in range(2)]
        request = HostRequest(self._slot(), len(operation.tokens), tokens, *nothing)
        batch, reserve = operation.sequences, operation.reserve
        self._fit(request.length + reserve, batch)
        numbers = self._whole_keys(request)[0]
        self._fit_keys()
        self._do(RtpCode.REQUEST, request, numbers, tokens=request.length, sequences=batch, reserve=reserve)
        self._requests[operation.id] = request

    def _append(self, operation: structs.AppendOp) -> None:
        request = self._request(operation.id)
        more = operation.tokens
        if len(more) != len(request.tokens) or len({len(each) for each in more}) != 1:
            expected = f"equally many for each of {len(request.tokens)} sequences"
            raise OperationError("tokens", more, expected)
        for known, new in zip(request.tokens, more, strict=True):
            known += new
        self._grow(request, len(more[0]))

    def _grow(self, request: HostRequest, tokens: int) -> None:
        request.length += tokens
        self._fit(request.length + self._reader.reserve(self._state, request.slot), 1)
        numbers = [number for each in self._whole_keys(request) for number in each]
        self._fit_keys()
        self._do(RtpCode.APPEND, request, numbers, tokens=tokens)
        if not self._reader.running(self._state, request.slot):
            request.keys = [RollingKeys() for _ in request.keys]

    def _malloc(self, operation: structs.MallocOp) -> structs.Malloc:
        request = self._request(operation.id)
        new = not self._reader.running(self._state, request.slot)
        if operation.length is not None and operation.length < 1:
            raise OperationError("length", operation.length, "at least 1")
        self._fit((operation.length or 0) + self._reader.reserve(self._state, request.slot), 1)
        request.keys = [self._keys(request, sequence, new) for sequence in range(len(request.keys))]
        flags: dict[str, Any] = {"reuse": int(operation.reuse), "device_cache": int(operation.device_cache)}
        allowed = (*VERDICTS, Status.TAIL_MISSING)
        row, _ = self._do(RtpCode.MALLOC, request, allowed=allowed, length=operation.length or 0, **flags)
        status = Status(int(row[RtpColumn.STATUS]))
        if status == Status.TAIL_MISSING:
            raise OperationError("blocks", status.name, "the last blocks of a window to be there")
        return structs.Malloc(VERDICTS[status], int(row[RtpColumn.VALUE]), self._lists(request))

    def _insert(self, operation: structs.InsertOp) -> None:
        request = self._request(operation.id)
        if not self._reader.running(self._state, request.slot):
            raise OperationError("id", operation.id, "a request with blocks")
        self._do(RtpCode.INSERT, request, resident=int(operation.resident))
        aligned = all(keys.aligned for keys in request.keys)
        request.keys = [RollingKeys(keys.keys if aligned else keys.keys[:-1], True) for keys in request.keys]

    def _free(self, request: HostRequest) -> None:
        if KEEPS_FREED_LISTS in self.config.bugs and self.config.name == SINGLE:
            left = collections.Counter(dict(enumerate(np.asarray(self._state.references)[0, :, Role.REQUEST].tolist())))
            left.subtract(block for (blocks,) in self._lists(request) for block in blocks)
            for block in (block for block, count in left.items() if count < 0):
                raise OperationError("block", block, "a block with a request reference")
        self._do(RtpCode.FREE, request)
        request.keys = [RollingKeys() for _ in request.keys]

    def _fork(self, operation: structs.ForkOp) -> structs.Fork:
        request, sources = self._request(operation.id), operation.sources
        for source in sources:
            if not 0 <= source < len(request.tokens):
                raise OperationError("sources", source, f"a sequence from 0 to {len(request.tokens) - 1}")
        self._fit(1, len(sources))
        allowed, copy = (Status.OK, Status.NO_ROOM), int(operation.copy_last)
        row, ids = self._do(RtpCode.FORK, request, sources, allowed=allowed, copy=copy)
        if row[RtpColumn.STATUS] != Status.OK:
            return structs.Fork(None, self._lists(request))
        if sources:
            request.tokens = [list(request.tokens[source]) for source in sources]
            request.chains = [request.chains[source] for source in sources]
            kept, forgets = request.keys, FORGETS_ALIGNMENT in self.config.bugs
            request.keys = [
                RollingKeys(
                    kept[source].keys, kept[source].aligned and not (forgets and source in sources[place + 1 :])
                )
                for place, source in enumerate(sources)
            ]
        tags = self.config.topology.tags
        copies = ids[: 3 * int(row[RtpColumn.COUNT])].reshape(-1, 3).tolist()
        return structs.Fork([(tags[group], old, new) for group, old, new in copies], self._lists(request))

    def _drop(self, id: str) -> None:
        request = self._request(id)
        if self._reader.running(self._state, request.slot):
            raise OperationError("id", id, "a request without blocks")
        self._do(RtpCode.DROP, request)
        self._free_slots.insert(0, request.slot)
        del self._requests[id]

    def _hold(self, operation: structs.HoldOp) -> structs.Selected:
        check_unused(self._held, operation.name)
        request, sequence = self._request(operation.id), operation.sequence
        if not 0 <= sequence < len(request.tokens):
            raise OperationError("sequence", sequence, f"a sequence from 0 to {len(request.tokens) - 1}")
        role = Role.CONNECTOR if operation.connector else Role.REQUEST
        self._do(RtpCode.HOLD, request, sequence=sequence, role=int(role))
        selected = self._reader.selected(
            self._lists(request)[sequence], request.keys[sequence], dummy_tail=operation.connector
        )
        if selected.blocks is not None:
            groups = enumerate(selected.blocks)
            self._held[operation.name] = role, _pairs([(g, block) for g, blocks in groups for block in blocks])
        return selected

    def _export(self, operation: structs.ExportOp) -> structs.Selected:
        check_unused(self._exported, operation.name)
        groups = len(self.config.policies)
        # Whole chains leave: up to a longest sequence's keys more than were asked for.
        chain = self._buckets.chain if self.config.prefix_tree else 0
        room = (operation.least + chain) * (1 + groups)
        row, ids = self._do(RtpCode.EXPORT, None, room=room, least=operation.least)
        keys = int(row[RtpColumn.COUNT])
        if keys == 0:
            return structs.Selected(None, None)
        table = ids[: keys * (1 + groups)].reshape(-1, 1 + groups)
        blocks = np.where(table[:, 1:] == 0, -1, table[:, 1:]).T.tolist()
        distinct: dict[tuple[int, int], tuple[int, int]] = {}
        for group, listed in enumerate(blocks):
            pool = self.config.topology.pool_of(self.config.topology.tags[group])
            for block in listed:
                distinct.setdefault((pool, block), (group, block))
        self._exported[operation.name] = _pairs(list(distinct.values()))
        return structs.Selected([self._interner.keys[number] for number in table[:, 0].tolist()], blocks)  # type: ignore[arg-type]

    def _peak(self, operation: structs.PeakOp) -> structs.Count:
        fields: dict[str, Any] = {
            "tokens": operation.remaining,
            "reuse": int(operation.reuse),
            "sequences": operation.sequences,
        }
        row, _ = self._do(RtpCode.PEAK, self._request(operation.id), **fields)
        return structs.Count(int(row[RtpColumn.VALUE]))

    def _do(
        self,
        code: RtpCode,
        request: HostRequest | None,
        numbers: Sequence[int] = (),
        *,
        room: int = 0,
        allowed: Sequence[Status] = (Status.OK,),
        **arguments: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Performs one operation; its row of results, and the ids it reported."""
        batch = RtpBatch().add(code, 0 if request is None else request.slot, numbers, **arguments)
        operations = jax.device_put(batch.build(OPERATIONS, PAYLOAD))
        ids = bucket(room, IDS)
        self._state, results = rtp_cache.run(self._parameters, self._state, operations, ids=ids)
        results = jax.device_get(results)
        row = results.table[0]
        if row[RtpColumn.STATUS] not in allowed:
            status = Status(int(row[RtpColumn.STATUS])).name
            raise OperationError(code.name.lower(), status, "one that applies to the request's state")
        return row, np.asarray(results.ids)

    # Keys and sizes.

    def _whole_keys(self, request: HostRequest) -> list[list[int]]:
        """Makes the keys of the whole blocks that a request's tokens fill, and returns the new ones' numbers."""
        block, found = self.config.block_size, []
        for sequence, tokens in enumerate(request.tokens):
            before = request.chains[sequence]
            after = request.chains[sequence] = next_keys(before, tokens, block)
            found.append(self._interner.numbers(after.keys[len(before.keys) :], len(before.keys)))
        return found

    def _keys(self, request: HostRequest, sequence: int, new: bool) -> RollingKeys:
        """The keys that a sequence has once blocks are asked for."""
        whole, known = request.chains[sequence], request.keys[sequence]
        if not new:
            return whole
        return known if known.keys else first_keys(request.tokens[sequence], self.config.block_size)

    def _lists(self, request: HostRequest) -> structs.Lists:
        return self._reader.lists(self._state, request.slot)

    def _request(self, id: str) -> HostRequest:
        try:
            return self._requests[id]
        except KeyError:
            raise OperationError("id", id, "a request that arrived and was not dropped") from None

    def _check_new(self, id: str, tokens: int, sequences: int, reserve: int) -> None:
        if id in self._requests:
            raise OperationError("id", id, "a name that no request has")
        for name, value, least in (("seq", tokens, 1), ("batch", sequences, 1), ("reserve", reserve, 0)):
            if value < least:
                raise OperationError(name, value, f"at least {least}")

    def _slot(self) -> int:
        if not self._free_slots:
            old = self._buckets.requests
            self._resize(dataclasses.replace(self._buckets, requests=4 * old))
            self._free_slots += range(old, self._buckets.requests)
        return self._free_slots.pop(0)

    def _fit(self, tokens: int, sequences: int) -> None:
        blocks = -(-tokens // self.config.block_size) + 2
        old = self._buckets
        self._resize(
            dataclasses.replace(
                old,
                row=bucket(blocks + max(0, tokens), old.row) if blocks > old.row else old.row,
                chain=bucket(blocks, old.chain),
                sequences=bucket(sequences, old.sequences),
            )
        )

    def _fit_keys(self) -> None:
        self._resize(dataclasses.replace(self._buckets, keys=bucket(len(self._interner), self._buckets.keys)))

    def _resize(self, buckets: Any) -> None:
        if buckets != self._buckets:
            self._state = jax.device_put(resized(jax.device_get(self._state), buckets))
            self._buckets = buckets


def _pairs(blocks: Sequence[tuple[int, int]]) -> list[int]:
    """Groups and blocks in turn, holes left out."""
    return [number for group, block in blocks if block > 0 for number in (group, block)]

"""The compiled cache as an engine: `hkv.dialects.vllm.machine` behind the operations of the log format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from hkv.contract.bugs import check_bugs
from hkv.dialects.vllm.bugs import BUGS
from hkv.dialects.vllm.config import VllmConfig, check_encoder, check_truncation
from hkv.dialects.vllm.engines import jax_reading as reading
from hkv.dialects.vllm.engines.engine import apply, check_offloads, check_zeroing, told
from hkv.dialects.vllm.engines.jax_batches import Answers, BatchedRequest, Dispatcher, Later, Room, said
from hkv.dialects.vllm.engines.jax_reading import PendingOffers, connector_hit, spans_of
from hkv.dialects.vllm.engines.numpy import identity_of
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.configuration import to_config
from hkv.dialects.vllm.machine import inner_keys
from hkv.dialects.vllm.rules.operations import Code, Flag
from hkv.errors import OperationError
from hkv.keys.chained import PLAIN, GivenKeys, Interner, KeyChain, PrefixIdentity, digest_by_name
from hkv.state.state import Counter, Request

AMOUNTS = ("new", "hit", "lookahead", "external", "reserved", "in_flight")
"""Fields of an allocation that are numbers, and columns of the compiled cache's operation."""


class JaxEngine:
    """The compiled cache. Implements `hkv.dialects.vllm.engines.engine.Engine` and `BatchEngine`.

    Operations are collected and performed many at a time; `run` performs a whole list with as few dispatches as the
    answers allow.

    Raises:
      HKVError: a configuration the dialect forbids, or one that needs what the compiled cache does not have.
    """

    def __init__(self, header: oplog.Header) -> None:
        self.config: VllmConfig = to_config(header)
        check_bugs(self.config.bugs, BUGS)
        self._version = header.oplog
        self._flags = int(Flag.LIVE) if header.oplog >= 3 else 0
        self._digest = digest_by_name(self.config.hash)
        self._interner = Interner()
        self._requests: dict[str, BatchedRequest] = {}
        self._dispatcher = Dispatcher(self.config, self._take_events)
        self._add, self._flush = self._dispatcher.add, self._dispatcher.flush
        self._groups = len(self.config.topology.groups)
        self._inner_keys = inner_keys(self.config)
        self._reader = reading.Reader(self.config, self._dispatcher.parameters, self._interner)
        self._events: list[oplog.CacheEvent] = []
        self._answers = Answers([self.config.zeroes(group) for group in range(self._groups)])
        self._looked_up: Later | None = None
        offered = [self.config.offers(group) for group in range(self._groups)]
        stale = "offer-outlives-state" in self.config.bugs
        self._offers = PendingOffers(offered, self.config.block_sizes, stale)
        self._offering, self._changes = any(offered), np.zeros((0, 4), np.int32)

    # One operation at a time.

    def step(self) -> None:
        self._add(Code.STEP, None)

    def request(
        self,
        id: str,
        tokens: Sequence[int],
        extra: oplog.ExtraKeys | None,
        keys: Sequence[str] | None = None,
        session: str = "",
        report: str = "",
    ) -> None:
        self._check_new(id, len(tokens))
        identity = PLAIN if extra is None else identity_of(extra)
        chain = self._chain(identity) if keys is None else GivenKeys()
        if isinstance(chain, GivenKeys):
            chain.give(keys or ())
        request = BatchedRequest(
            self._dispatcher.slot(), len(tokens), list(tokens), chain, [], identity, session, bool(report)
        )
        self._requests[id] = request
        self._add(Code.REQUEST, request, payload=self._grow(request), tokens=len(tokens))

    def _chain(self, identity: PrefixIdentity) -> KeyChain | GivenKeys:
        config = self.config
        return KeyChain(self._digest, config.hash_block_size, config.hash_lookahead, identity, config.hash_seed)

    def lookup(self, id: str, limit: int | None = None) -> oplog.Hit:
        return self._now(self._lookup(id, limit))

    def connector_lookup(self, id: str, limit: int | None = None) -> oplog.ConnectorHit:
        request = self._request(id)

        def by_itself(place: int) -> oplog.Hit:
            with self._dispatcher.searching(place):
                return self._now(self._search(request, limit))

        return connector_hit(self.config, by_itself, lambda: self.lookup(id, limit))

    def truncate(self, rows: oplog.Rows, tokens: int) -> oplog.Rows:
        check_truncation(self.config, rows, tokens)
        return [row[: tokens // size] for row, size in zip(rows, self.config.block_sizes, strict=True)]

    def allocate(self, operation: oplog.AllocateOp) -> oplog.Allocation:
        return self._now(self._allocate(operation))

    def advance(self, id: str, tokens: int) -> None:
        self._add(Code.ADVANCE, self._request(id), tokens=tokens)

    def computed(self, id: str, tokens: int) -> None:
        self._add(Code.COMPUTED, self._request(id), tokens=tokens)

    def append(self, id: str, tokens: Sequence[int], keys: Sequence[str] = ()) -> None:
        request = self._request(id)
        self._check_length(request, len(tokens))
        if isinstance(request.chain, GivenKeys):
            request.chain.give(keys)
        elif keys:
            raise OperationError("keys", list(keys), "none: this request's are computed")
        request.tokens.extend(tokens)
        request.num_tokens += len(tokens)
        self._add(Code.APPEND, request, payload=self._grow(request), tokens=len(tokens))

    def resume(self, operation: oplog.ResumeOp) -> None:
        """A streaming session goes on: its tokens and keys are cut in the state, and then appended to."""
        request = self._request(operation.id)
        request.check_resumption(operation, self.config.max_model_len)
        self._flush()  # events name tokens as they were
        request.cut(operation, self.config.hash_block_size)
        cut = request.slot, operation.keep, len(request.numbers), operation.prompt
        self._dispatcher.state = reading.resumed(self._dispatcher.state, *cut)
        self._add(Code.APPEND, request, payload=self._grow(request), tokens=len(operation.tokens))

    def commit(self, id: str, tokens: int) -> None:
        request = self._request(id)
        if self._offering:
            self._flush()
        self._add(Code.COMMIT, request, room=self._room_of(tokens), tokens=tokens, flags=self._flags)
        if self._offering:
            self._flush()
            self._note_offers(id)

    def retire(self, id: str, tokens: int) -> None:
        self._add(Code.RETIRE, self._request(id), tokens=tokens, flags=self._flags)

    def pop(self, id: str) -> None:
        self._offers.withdraw(id)
        self._add(Code.POP, self._request(id))

    def release(self, blocks: Sequence[int]) -> None:
        self._now(self._add(Code.COPIES, None, payload=self._existing(blocks)))

    def hold(self, blocks: Sequence[int]) -> None:
        self._now(self._add(Code.COPIES, None, payload=self._existing(blocks), flags=int(Flag.HOLD)))

    def zeros(self) -> list[int]:
        check_zeroing(self.config)
        self._flush()
        return self._answers.take_zeros()

    def unwritten(self, id: str, tokens: int) -> None:
        check_zeroing(self.config)
        rows = self.state().rows.get(id)
        if rows is None:
            raise OperationError("id", id, "a running request")
        for group in range(self._groups):
            size = self.config.block_size(group)
            if self.config.zeroes(group) and (type(tokens) is not int or tokens < 0 or tokens % size):
                raise OperationError("tokens", tokens, f"a multiple of group {group}'s block of {size}")
        self._answers.zero_row(rows, [tokens // self.config.block_size(group) for group in range(self._groups)])

    def offloads(self) -> oplog.Offers:
        check_offloads(self.config)
        return self._offers.take(self.state())

    def finalize(self, id: str, in_flight: int) -> list[oplog.Offer]:
        check_offloads(self.config)
        if type(in_flight) is not int or in_flight < 0:
            raise OperationError("in_flight", in_flight, "an integer of at least 0")
        request, state = self._request(id), self.state()
        if id not in state.rows:
            raise OperationError("id", id, "a running request")
        computed = int(jax.device_get(self._dispatcher.state.requests)[request.slot, Request.COMPUTED])
        return self._offers.finalize(id, -1 if in_flight else computed, state)

    def _note_offers(self, id: str, left: Sequence[Sequence[int]] = ()) -> None:
        """Notes what an operation about a request, all of the last dispatch, registered and `left` to the cache."""
        if left or len(self._changes):
            words = np.asarray(jax.device_get(self._dispatcher.state.requests))[self._request(id).slot]
            self._offers.note(id, self._changes, left, words, self.state())

    def _existing(self, blocks: Sequence[int]) -> Sequence[int]:
        for block in blocks:
            if type(block) is not int or not 1 <= block < self.config.num_blocks:
                raise OperationError("blocks", block, f"block ids from 1 to {self.config.num_blocks - 1}")
        return blocks

    def free(self, id: str) -> None:
        self._offers.withdraw(id)
        self._add(Code.FREE, self._request(id))

    def drop(self, id: str) -> None:
        request = self._request(id)
        self._add(Code.DROP, request)
        self._dispatcher.leave(request.slot)
        del self._requests[id]

    def evict(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if type(block) is not int or not 0 <= block < self.config.num_blocks:
                raise OperationError("blocks", block, f"block ids from 0 to {self.config.num_blocks - 1}")
        room = Room(0, len(blocks) * (1 + self._inner_keys))
        self._add(Code.EVICT, None, payload=blocks, room=room)

    def copies(self, hold: bool = False) -> list[tuple[int, int]]:
        self._flush()
        pending = sorted(self._answers.take_copies(), key=lambda copy: copy[0])
        copies = [(source, target) for _, source, target in pending]
        if copies and not hold:
            self._add(Code.COPIES, None, payload=[block for copy in copies for block in copy])
        return copies

    def reset(self) -> bool:
        return self._now(self._reset())

    def events(self) -> list[oplog.CacheEvent]:
        self._flush()
        events, self._events = self._events, []
        return told(events, self._version)

    def state(self) -> oplog.CacheState:
        """State of the cache, as far as engines are compared."""
        self._flush()
        slots = {id: request.slot for id, request in self._requests.items()}
        return self._reader.state(jax.device_get(self._dispatcher.state), slots)

    def num_free(self) -> int:
        """Blocks in the free queue."""
        self._flush()
        return int(jax.device_get(self._dispatcher.state.counters)[Counter.FREE])

    @property
    def evictions(self) -> int:
        """Cached blocks handed out to another use so far."""
        self._flush()
        return int(jax.device_get(self._dispatcher.state.counters)[Counter.EVICTIONS])

    # Many at a time.

    def run(self, operations: Sequence[oplog.Operation]) -> list[oplog.Answer]:
        """Performs operations in order and returns their answers."""
        answers = [self._begin(operation) for operation in operations]
        self._flush()
        return [answer.value if isinstance(answer, Later) else answer for answer in answers]

    def _begin(self, operation: oplog.Operation) -> Any:
        match operation:
            case oplog.LookupOp():
                return self._lookup(operation.id, operation.limit)
            case oplog.AllocateOp():
                return self._allocate(operation)
            case oplog.ResetOp():
                return self._reset()
            case _:
                return apply(self, operation)

    # What operations become.

    def _lookup(self, id: str, limit: int | None = None) -> Later:
        request = self._request(id)
        if request.reports:
            self._flush()  # answers keep the order of operations
        later = self._looked_up = self._search(request, limit)
        if request.reports:
            self._flush()
            for span in spans_of(later.value, self.config, len(request.numbers)):
                self._events.append(self._reader.stored(span, request))
        return later

    def _search(self, request: BatchedRequest, limit: int | None) -> Later:
        most = 0 if limit is None else limit + 1
        room = Room(self._blocks(max(request.num_tokens, most)), 0)
        return self._add(Code.LOOKUP, request, room=room, read=self._answers.hit, tokens=most)

    def _allocate(self, operation: oplog.AllocateOp) -> Later:
        request = self._request(operation.id)
        for name in AMOUNTS:
            value = getattr(operation, name)
            if type(value) is not int or value < 0:
                raise OperationError(name, value, "an integer of at least 0")
        encoder = operation.encoder or 0
        check_encoder(encoder, self.config.encoder_tokens)
        flags = said(operation)
        if operation.rows is not None:
            flags |= Flag.ROWS
            payload = [number for row in operation.rows for number in (len(row), *row)]
            self._add(Code.FOUND, request, payload=payload, tokens=operation.hit)
        needed = request.num_tokens + operation.new + operation.lookahead + operation.external + encoder
        if self._offering or (self.config.zeroing and operation.external):
            self._flush()
        pending = len(self._answers.pending_copies)
        before = [len(zeros) for zeros in self._answers.zeros]
        boundary = -1 if operation.shared_prefix is None else operation.shared_prefix
        columns: dict[str, Any] = {name: int(getattr(operation, name)) for name in (*AMOUNTS, "delay", "must_fit")}
        more: dict[str, Any] = {"shared_prefix": boundary, "tokens": encoder, "flags": int(flags)}
        room, read = self._room_of(needed), self._answers.allocation
        later = self._add(Code.ALLOCATE, request, room=room, read=read, **columns, **more)
        if self.config.zeroing and operation.external:
            self._flush()
            if later.value.blocks is not None:
                rows = self.state().rows[operation.id]
                starts = [len(row) for row in self._adopted(operation)]
                self._answers.zero_loaded(rows, starts, before, later.value.blocks, operation.loaded)
        if self._offering:
            self._flush()
            self._note_offers(operation.id, () if operation.hit else self._answers.pending_copies[pending:])
        return later

    def _adopted(self, operation: oplog.AllocateOp) -> oplog.Rows:
        """Rows of the hit that an allocation adopts."""
        if operation.rows is not None:
            return operation.rows
        if not operation.hit or self._looked_up is None:
            return [[] for _ in range(self._groups)]
        return self._looked_up.value.blocks

    def _reset(self) -> Later:
        return self._add(Code.RESET, None, room=Room(0, 1), read=self._answers.reset)

    # Batches.

    def _now(self, later: Later) -> Any:
        self._flush()
        return later.value.ok if isinstance(later.value, oplog.Reset) else later.value

    def _take_events(self, waiting: Sequence[Later], changes: np.ndarray) -> None:
        self._changes = changes
        slots = {later.request.slot: later.request for later in waiting if later.request is not None}
        self._events += self._reader.events(changes, slots)

    # Host-side checks and sizes.

    def _request(self, id: str) -> BatchedRequest:
        try:
            return self._requests[id]
        except KeyError:
            raise OperationError("id", id, "a request that arrived and was not dropped") from None

    def _check_new(self, id: str, num_tokens: int) -> None:
        if id in self._requests:
            raise OperationError("id", id, "a name that no request has")
        if not 1 <= num_tokens <= self.config.max_model_len:
            raise OperationError("tokens", num_tokens, f"1 to max_model_len {self.config.max_model_len} tokens")

    def _check_length(self, request: BatchedRequest, more: int) -> None:
        room = self.config.max_model_len - request.num_tokens
        if more > room:
            raise OperationError("tokens", more, f"at most {room}: max_model_len is {self.config.max_model_len}")

    def _grow(self, request: BatchedRequest) -> list[int]:
        """Makes the prefix keys that a request's tokens complete, and returns their numbers."""
        before = len(request.numbers)
        request.chain.extend(request.tokens)
        new = self._interner.numbers(request.chain.keys[before:], before)
        request.numbers += new
        self._dispatcher.fit_keys(len(self._interner))
        return new

    def _blocks(self, tokens: int) -> int:
        tokens = min(tokens, max(self.config.max_model_len, self.config.encoder_tokens))
        specs, sizes = self.config.topology.specs, self.config.block_sizes
        scratch = sum(spec.scratch_blocks for spec in specs)
        return sum(-(-tokens // size) + 8 for size in sizes) + scratch

    def _room_of(self, tokens: int) -> Room:
        blocks = self._blocks(max(0, tokens))
        return Room(blocks, blocks * (3 + self._inner_keys) + 4 * self._groups)

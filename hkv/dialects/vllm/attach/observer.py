"""A live `KVCacheManager` under observation: every call and answer, and what changed without one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hkv.dialects import registry
from hkv.dialects.vllm.attach.header import header_from
from hkv.dialects.vllm.attach.hooks import Hooks
from hkv.dialects.vllm.attach.requests import Requests, Tracked, UntellableError
from hkv.dialects.vllm.engines import vllm_objects
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import Allocation, CacheState, Header, Hit
from hkv.errors import HKVError
from hkv.oracle.attach.sink import Sink

DIGEST_EVERY = 64
"""Operations between two digests of the state."""

WAITING = ("WAITING", "PREEMPTED")
"""Statuses of requests that the watermark is for."""


MARKS = (
    "free blocks",
    "cached keys",
    "first free block",
    "last free block",
    "retention_interval",
    "watermark_blocks",
    "max_model_len",
    "references",
    "rows",
    "keys",
    "queue",
)
"""Names of what is compared between two calls."""


class Observer:
    """Says to a sink what a manager is asked and what it answers.

    Args:
      manager: vLLM's `KVCacheManager`, which has done nothing yet.
      header: its header.
      sink: where operations go.
      states: as `hkv.oracle.attach.settings.AttachSettings.states`.

    Attributes:
      ended: reason why the log ended before the manager did; "" while it has not.
    """

    def __init__(self, manager: Any, header: Header, sink: Sink, states: str) -> None:
        self._manager, self._header, self._sink, self._states = manager, header, sink, states
        self._pool = manager.block_pool
        self._early: list[tuple[Any, Any]] | None = []
        self._requests = Requests(header, self._tell)
        self._found: tuple[str, Any, int] | None = None
        self._told = 0
        self.ended = ""
        self._closed = False
        self._hooks = Hooks(manager, self)
        self._mark = self._fingerprint()

    # Operations and answers.

    def _tell(self, operation: Any, answer: Any = None) -> None:
        self._told += 1
        if not isinstance(operation, oplog.ComputedOp):
            self._found = None
        if self._early is not None:
            self._early.append((operation, answer))
            if not self._requests.hash_known:
                return
            self._begin()
            return
        self._sink.operation(operation, answer)

    def _begin(self) -> None:
        early, self._early = self._early or [], None
        self._sink.begin(self._header)
        for operation, answer in early:
            self._sink.operation(operation, answer)

    def end(self, reason: str) -> None:
        """Ends the log; the manager goes on unobserved."""
        if not self.ended and not self._closed:
            self.ended = reason
            self._tell(oplog.EndOp(reason=reason))
            self._finish()

    def close(self) -> None:
        """Says the last state and ends the observation."""
        if not self.ended and not self._closed:
            self.look_for_changes("the end")
        if not self.ended and not self._closed:
            if self._states != "none":
                self._tell(oplog.StateOp(), self._state())
            self._finish()

    def _finish(self) -> None:
        self._closed = True
        self._hooks.remove()
        if self._early is not None:
            self._begin()
        self._sink.close()

    # What the hooks call: before and after a method, at the outermost level.

    def look_for_changes(self, before: str) -> None:
        """Ends the log where the state is not what the last call left."""
        if not self._told:
            self._read_header_anew(before)
        if not _same(now := self._fingerprint(), self._mark):
            changes = [
                f"{name}: {str(_plain(old))[:60]} became {str(_plain(new))[:60]}"
                for name, old, new in zip(MARKS, self._mark, now, strict=False)
                if _plain(old) != _plain(new)
            ]
            self.end(f"poked before {before}: {'; '.join(changes)}")

    def _read_header_anew(self, before: str) -> None:
        """Until its first call, a manager's configuration may be changed."""
        try:
            now = header_from(self._manager, self._header.max_in_flight_tokens)
            registry.dialect_of(now.dialect).log.check(now)
        except HKVError as error:
            self.end(f"configured anew before {before}: {error}")
            return
        for name in now.__struct_fields__:
            setattr(self._header, name, getattr(now, name))
        self._mark = self._fingerprint()

    def settle(self) -> None:
        """Takes note of the state that a call left."""
        if self.ended or self._closed:
            return
        if self._states == "all":
            self._tell(oplog.StateOp(), self._state())
        elif self._states == "digest" and self._told // DIGEST_EVERY != self._digested:
            self._digested = self._told // DIGEST_EVERY
            self._tell(oplog.DigestOp(), oplog.state_digest(self._state()))
        self._mark = self._fingerprint()

    _digested = 0

    def _fingerprint(self) -> tuple[Any, ...]:
        pool, manager = self._pool, self._manager
        queue = pool.free_block_queue
        cheap = (
            queue.num_free_blocks,
            len(pool.cached_block_hash_to_block),
            queue.fake_free_list_head.next_free_block,
            queue.fake_free_list_tail.prev_free_block,
            manager.coordinator.retention_interval,
            manager.watermark_blocks,
            manager.max_model_len,
        )
        if self._states != "all":
            return cheap
        state = self._state()
        return (*cheap, state.refs, state.rows, state.cached, state.free)

    def _state(self) -> CacheState:
        manager = self._manager
        blocks = [block for block in self._pool.blocks if not block.is_null]
        rows = {}
        for id, tracked in self._requests.tracked.items():
            row = [[block.block_id for block in group] for group in manager.coordinator.get_blocks(id)]
            if any(row):
                rows[tracked.name] = row
        return CacheState(
            free=[block.block_id for block in self._pool.free_block_queue.get_all_free_blocks()],
            refs={str(block.block_id): block.ref_cnt for block in blocks if block.ref_cnt},
            rows=rows,
            cached={str(b.block_id): vllm_objects.cached_entry(b) for b in blocks if b.block_hash is not None},
        )

    def new_step(self) -> None:
        """`new_step_starts` returned."""
        if self._states == "step" and self._told:
            self._tell(oplog.StateOp(), self._state())
        self._tell(oplog.StepOp())

    def looks_up(self, request: Any) -> str:
        """`get_computed_blocks` is about to look a request up; the name under which it does."""
        if not self._manager.prefix_cache_lookup_enabled(request):
            return ""
        if self._manager.enable_kv_cache_events and getattr(request, "kv_cache_report_mode", "") == "full":
            raise UntellableError("a request whose hits are published as events (kv_cache_report_mode full)")
        tracked = self._requests.up_to_date(request)
        return self._requests.probe(request) if tracked.running else tracked.name

    def looked_up(self, name: str, limit: int | None, answer: tuple[Any, int, int]) -> None:
        """`get_computed_blocks` returned."""
        if not name:
            return
        blocks, hit, boundary = answer
        groups = blocks.blocks
        self._tell(oplog.LookupOp(id=name, limit=limit), lambda: Hit(hit, _ids(groups), boundary))
        if name.partition("#")[0].endswith("?"):
            self._tell(oplog.DropOp(id=name))
        self._found = (name, blocks, hit)

    def allocates(self, request: Any, num_encoder_tokens: int) -> tuple[Tracked, Any]:
        """`allocate_slots` is about to be called: the request, and the lookup that it may adopt."""
        if num_encoder_tokens:
            raise UntellableError("encoder tokens, which cross attention caches")
        found = self._found
        tracked = self._requests.up_to_date(request)
        return tracked, found

    def allocated(self, tracked: Tracked, found: Any, arguments: Any, answer: Any) -> None:
        """`allocate_slots` returned."""
        request = tracked.request
        hit, adopted = arguments.num_new_computed_tokens, arguments.new_computed_blocks
        rows = None
        if hit or (adopted is not None and any(adopted.blocks)):
            if not hit:
                raise UntellableError("blocks of a hit of no tokens")
            if tracked.running:
                raise UntellableError("a hit for a request that holds blocks")
            if found != (tracked.name, adopted, hit) or self._found is not found:
                rows = [[]] * len(self._header.groups) if adopted is None else _ids(adopted.blocks)
        if tracked.running and arguments.num_external_computed_tokens:
            raise UntellableError("external tokens for a request that holds blocks")
        boundary = request.shared_prefix_boundary
        operation = oplog.AllocateOp(
            id=tracked.name,
            new=arguments.num_new_tokens,
            hit=hit,
            lookahead=arguments.num_lookahead_tokens,
            external=arguments.num_external_computed_tokens,
            delay=arguments.delay_cache_blocks,
            must_fit=arguments.full_sequence_must_fit,
            reserved=arguments.reserved_blocks,
            in_flight=request.num_in_flight_tokens,
            shared_prefix=boundary if boundary != tracked.shared_prefix else None,
            rows=rows,
        )
        if self._manager.watermark_blocks:
            operation.waiting = request.status.name in WAITING
            operation.scheduled = bool(arguments.has_scheduled_reqs)
        tracked.shared_prefix = boundary
        if answer is None:
            self._tell(operation, Allocation(None))
            return
        tracked.running = True
        groups = answer.blocks
        self._tell(operation, lambda: Allocation(_ids(groups)))

    def cached(self, tracked: Tracked, tokens: int) -> None:
        """`cache_blocks` returned."""
        if not tracked.running:
            raise UntellableError("cache_blocks of a request that holds no blocks")
        self._tell(oplog.CommitOp(id=tracked.name, tokens=tokens))

    def retired(self, request_id: str, processed: int) -> None:
        """`remove_skipped_blocks` returned."""
        tracked = self._requests.known(request_id)
        if tracked is not None:
            self._tell(oplog.RetireOp(id=tracked.name, tokens=max(0, processed)))

    def up_to_date(self, request: Any) -> Tracked:
        """The request, told as it is now."""
        return self._requests.up_to_date(request)

    def freed(self, request: Any, popped: bool) -> None:
        """`free` or `pop_blocks_for_free` returned."""
        tracked = self._requests.known(request.request_id)
        if tracked is None:
            return
        if tracked.running:
            tracked.running, tracked.computed = False, 0
            operation = oplog.PopOp if popped else oplog.FreeOp
            self._tell(operation(id=tracked.name))
        if request.is_finished():
            self._requests.drop(tracked)

    def released(self, blocks: Iterable[Any]) -> None:
        """`BlockPool.free_blocks` returned, called from elsewhere than the manager."""
        ids = [block.block_id for block in blocks if not block.is_null]
        if ids:
            self._tell(oplog.ReleaseOp(blocks=ids))

    def held(self, blocks: Iterable[Any]) -> None:
        """`BlockPool.touch` returned, called from elsewhere than the manager."""
        ids = [block.block_id for block in blocks if not block.is_null]
        if ids:
            self._tell(oplog.HoldOp(blocks=ids))

    def evicted(self, ids: Iterable[int]) -> None:
        """`evict_blocks` returned."""
        self._tell(oplog.EvictOp(blocks=sorted(ids)))

    def reset(self, done: bool) -> None:
        """`reset_prefix_cache` returned."""
        self._tell(oplog.ResetOp(), oplog.Reset(done))

    def copied(self, copies: list[Any]) -> None:
        """`take_kv_cache_block_copies` returned; the scheduler gives the references back by itself."""
        if copies or self._header.partial_hits:
            pairs = [(copy.src_block_id, copy.dst_block_id) for copy in copies]
            self._tell(oplog.CopiesOp(hold=True), pairs)

    def drained(self, events: list[Any]) -> None:
        """`take_events` returned."""
        if self._pool.enable_kv_cache_events:
            taken = [vllm_objects.event(event, self._header.oplog) for event in events]
            self._tell(oplog.EventsOp(), [event for event in taken if event is not None])


def _same(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    # Blocks are compared as objects: dataclasses would compare the whole queue that hangs on them.
    return now[2] is before[2] and now[3] is before[3] and now[:2] == before[:2] and now[4:] == before[4:]


def _plain(value: Any) -> Any:
    return getattr(value, "block_id", value)


def _ids(groups: Iterable[Iterable[Any]]) -> list[list[int]]:
    return [[block.block_id for block in group] for group in groups]

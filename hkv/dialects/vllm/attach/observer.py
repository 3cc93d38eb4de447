"""A live `KVCacheManager` under observation: operations and answers made of its calls, and what changed without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hkv.contract import registry
from hkv.contract.attach import Sink
from hkv.dialects.vllm.attach.header import MARKS, Mark, Seen, header_from, marker, state_of
from hkv.dialects.vllm.attach.requests import Requests, Tracked, UntellableError
from hkv.dialects.vllm.engines import vllm_objects
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import Allocation, CacheState, ConnectorHit, Header, Hit
from hkv.errors import HKVError

DIGEST_EVERY = 64
"""Calls between two digests of the state."""

WAITING = ("WAITING", "PREEMPTED")
"""Statuses of requests that the watermark is for."""
REFUSED = Allocation(None)
"""Answer to a request that gets no blocks."""


class Observer:
    """Notes what a manager that has done nothing yet is asked and answers, and says it to a sink as operations.

    Hooks note calls in the manager's own thread; the sink performs the notes, in order, in a thread of its choice.
    `hooks` sets them, for this object; `remove` of what it returns takes them away.

    Attributes:
      note: takes a call: the hooked method's name, marks before and after it, a method of this object, its arguments;
        of `allocate_slots` a longer tuple.
      begun: whether a call was noted.
      mark: takes a mark of the manager, of its whole state if `whole`.
      ended: reason why the log ended before the manager did; "" while it has not.
    """

    def __init__(self, manager: Any, header: Header, sink: Sink, states: str, hooks: Callable[..., Any]) -> None:
        self._manager, self._header, self._sink, self._states = manager, header, sink, states
        self.whole = states == "all"
        self.mark = marker(manager, self.whole)
        self._early: list[tuple[Any, Any]] | None = []
        self._requests = Requests(header, self._tell)
        self._found: tuple[str, Any, int] | None = None
        self._mark: Mark | None = None
        self._first = self.mark()[:5]  # all that is not configuration
        self._closed = self.begun = False
        self._noted = 0
        self._reads_encoder = any("encoder_len" in group for group in header.groups)
        self._empty, self._nothing = manager.empty_kv_cache_blocks, Allocation([[] for _ in header.groups])
        self.ended = ""
        self._capture = sink.calls_to(self._perform)
        self.note = self._note_with_digest if states == "digest" else self._capture
        self._hooks = hooks(manager, self)

    # In the manager's thread.

    def watching(self, before: str) -> bool:
        """True if calls are noted; until the first, the manager's configuration may be changed."""
        if not self._closed and not self.begun:
            try:
                now = header_from(self._manager, self._header.max_in_flight_tokens)
                registry.dialect_of(now.dialect).log.check(now)
            except HKVError as error:
                self.stop(f"configured anew before {before}: {error}")
                return False
            for name in now.__struct_fields__:
                setattr(self._header, name, getattr(now, name))
            mark = self.mark()[: len(self._first)]
            if not _same(mark, self._first):
                self.stop(f"poked before {before}: {_changes(self._first, mark)}")
        return not self._closed

    def state_of_step(self) -> CacheState | None:
        """The state, if it is recorded in each step."""
        return state_of(self._manager) if self._states == "step" and self.begun else None

    def step_ends(self) -> None:
        """The last call of a scheduling step has returned."""
        self._sink.step_ends()

    def stop(self, reason: str) -> None:
        """Ends the log; the manager goes on unobserved."""
        if not self._closed:
            self._capture(("", None, None, self._stopped, (reason,)))
            self._leave()

    def close(self) -> None:
        """Says the last state and ends the observation."""
        if not self._closed and self.watching("the end"):
            mark = self.mark()
            state = state_of(self._manager) if self._states != "none" else None
            self._capture(("the end", mark, mark, self._closes, (state,)))
            self._leave()

    def _leave(self) -> None:
        self._closed = True
        self._hooks.remove()
        self._sink.close()

    def _note_with_digest(self, call: Any) -> None:
        self._capture(call)
        self._noted += 1
        if self._noted % DIGEST_EVERY == 0:
            self._capture(("", None, None, self._digest, (state_of(self._manager),)))

    # Wherever the sink performs what was noted.

    def _perform(self, call: Any) -> None:
        name, before, after = call[:3]
        brief = len(call) > 5
        if brief and before is None:
            before, after = call[3:5], call[5:7]
        if self.ended or self._poked(name, before):
            return
        try:
            if brief:
                self._allocated(*call[7:])
            else:
                call[3](*call[4])
        except UntellableError as reason:
            self._end(f"{name}: {reason}")
            return
        if after is not None:
            self._mark = after
            if self._states == "all" and not self._closed_log:
                self._tell(oplog.StateOp(), self._named(CacheState(after[11], *after[8:11])))

    def _poked(self, name: str, before: Mark | None) -> bool:
        """True if the state is not what the last call left; the log ends there."""
        if self._mark is None or before is None or _same(before, self._mark):
            return False
        self._end(f"poked before {name}: {_changes(self._mark, before)}")
        return True

    _closed_log = False

    def _tell(self, operation: Any, answer: Any = None) -> None:
        if not isinstance(operation, oplog.ComputedOp):
            self._found = None
        if self._early is None:
            self._sink.operation(operation, answer)
            return
        self._early.append((operation, answer))
        if self._requests.hash_known:
            self._begin()

    def _begin(self) -> None:
        early, self._early = self._early or [], None
        self._sink.begin(self._header)
        for operation, answer in early:
            self._sink.operation(operation, answer)

    def _end(self, reason: str) -> None:
        self._stopped(reason)
        if not self._closed:
            self._leave()

    def _stopped(self, reason: str) -> None:
        self.ended = reason
        self._tell(oplog.EndOp(reason=reason))
        self._finish()

    def _closes(self, state: CacheState | None) -> None:
        if state is not None:
            self._tell(oplog.StateOp(), self._named(state))
        self._finish()

    def _finish(self) -> None:
        self._closed_log = True
        if self._early is not None:
            self._begin()

    def _digest(self, state: CacheState) -> None:
        self._tell(oplog.DigestOp(), oplog.state_digest(self._named(state)))

    def _named(self, state: CacheState) -> CacheState:
        """A state whose rows stand under the log's names, in the order in which the requests came."""
        rows = {each.name: state.rows[id] for id, each in self._requests.tracked.items() if id in state.rows}
        return CacheState(state.free, state.refs, rows, state.cached)

    def new_step(self, state: CacheState | None) -> None:
        """`new_step_starts` returned."""
        if state is not None:
            self._tell(oplog.StateOp(), self._named(state))
        self._tell(oplog.StepOp())

    def looked_up(self, seen: Seen, mode: str, limit: int | None, answer: tuple[Any, int, int]) -> None:
        """`get_computed_blocks` returned."""
        tracked = self._requests.up_to_date(seen)
        if mode == oplog.FULL and tracked.report is None:
            raise UntellableError(f"report mode {mode} for a request that came without it")
        blocks, hit, boundary = answer
        name = self._asked(oplog.LookupOp, seen, tracked, limit, Hit(hit, vllm_objects.ids(blocks.blocks), boundary))
        self._found = (name, blocks, hit)

    def connector_looked_up(self, seen: Seen, limit: int | None, found: ConnectorHit) -> None:
        """`get_computed_blocks_for_connector` returned; what is adopted of it, `allocate` says by rows."""
        self._asked(oplog.ConnectorLookupOp, seen, self._requests.up_to_date(seen), limit, found)

    def _asked(self, asks: Any, seen: Seen, tracked: Tracked, limit: int | None, answer: Hit) -> str:
        """Tells a lookup, of a request that runs under another name; returns the name."""
        name = self._requests.probe(seen) if tracked.running else tracked.name
        self._tell(asks(id=name, limit=limit), answer)
        if tracked.running:
            self._tell(oplog.DropOp(id=name))
        return name

    def truncated(self, rows: oplog.Rows, tokens: int, left: oplog.Rows) -> None:
        """`truncate_computed_blocks` returned."""
        self._tell(oplog.TruncateOp(rows=rows, tokens=tokens), oplog.Truncated(left))

    def _allocated(
        self,
        request: Any,
        computed: int,
        length: int,
        count: int,
        turn: tuple[list[int], list[bytes]] | None,
        in_flight: int,
        boundary: int,
        status: Any,
        new: int,
        hit: int,
        blocks: Any,
        lookahead: int,
        external: int,
        delay: bool,
        encoder: int,
        must_fit: bool,
        reserved: int,
        scheduled: bool,
        loaded: tuple[int, ...],
        adopted: list[list[int]] | None,
        answer: Any,
    ) -> None:
        """`allocate_slots` returned; arguments as the hook notes them."""
        found = self._found
        # Only a streaming session's tokens change otherwise than at the end; references less are noted in less time.
        tokens, hashes = (request._all_token_ids, request.block_hashes) if turn is None else turn
        tracked = self._requests.up_to_date((request, computed, length, count, tokens, hashes))
        operation = oplog.AllocateOp(
            id=tracked.name,
            new=new,
            hit=hit,
            lookahead=lookahead,
            external=external,
            delay=delay,
            must_fit=must_fit,
            reserved=reserved,
            in_flight=in_flight,
        )
        if encoder:
            if not self._reads_encoder:
                raise UntellableError("encoder tokens, which no group reads")
            operation.encoder = encoder
        if hit or adopted is not None:
            operation.rows = self._adopted(tracked, found, hit, blocks, adopted)
        if external and tracked.running:
            raise UntellableError("external tokens for a request that holds blocks")
        if loaded and self._header.zeroing:
            operation.loaded = list(loaded)
        if boundary != tracked.shared_prefix:
            operation.shared_prefix = tracked.shared_prefix = boundary
        if self._header.watermark:
            operation.waiting = status.name in WAITING
            operation.scheduled = bool(scheduled)
        if answer is None:
            self._tell(operation, REFUSED)
            return
        tracked.running = True
        self._tell(operation, self._nothing if answer is self._empty else Allocation(vllm_objects.ids(answer.blocks)))

    def _adopted(
        self, tracked: Tracked, found: Any, hit: int, blocks: Any, adopted: list[list[int]] | None
    ) -> list[list[int]] | None:
        """The hit that a request adopts; None for that of the lookup just before."""
        rows = adopted or [[]] * len(self._header.groups)
        if not hit:
            if any(rows):
                raise UntellableError("blocks of a hit of no tokens")
            return None
        if tracked.running:
            raise UntellableError("a hit for a request that holds blocks")
        if found is None or self._found is not found or (found[0], found[2]) != (tracked.name, hit):
            return rows
        if found[1] is blocks or (blocks is not None and vllm_objects.ids(found[1].blocks) == rows):
            return None
        return rows

    def cached(self, answer: None, request: Seen, num_computed_tokens: int) -> None:
        """`cache_blocks` returned; of a request that holds no blocks, it did nothing."""
        tracked = self._requests.up_to_date(request)
        if tracked.running:
            self._tell(oplog.CommitOp(id=tracked.name, tokens=num_computed_tokens))

    def retired(
        self, answer: None, request_id: str, processed_computed_tokens: int, num_prompt_tokens: Any = 0
    ) -> None:
        """`remove_skipped_blocks` returned."""
        tracked = self._requests.tracked.get(request_id)
        if tracked is not None:
            self._tell(oplog.RetireOp(id=tracked.name, tokens=max(0, processed_computed_tokens)))

    def freed(self, request_id: str, finished: bool, popped: bool) -> None:
        """`free` or `pop_blocks_for_free` returned."""
        tracked = self._requests.tracked.get(request_id)
        if tracked is None:
            return
        if tracked.running:
            tracked.running, tracked.computed = False, 0
            operation = oplog.PopOp if popped else oplog.FreeOp
            self._tell(operation(id=tracked.name))
        if finished:
            self._requests.drop(tracked)

    def released(self, answer: None, ordered_blocks: list[Any]) -> None:
        """`BlockPool.free_blocks` returned, called from elsewhere than the manager."""
        ids = [block.block_id for block in ordered_blocks if not block.is_null]
        if ids:
            self._tell(oplog.ReleaseOp(blocks=ids))

    def held(self, answer: None, blocks: list[Any]) -> None:
        """`BlockPool.touch` returned, called from elsewhere than the manager."""
        ids = [block.block_id for block in blocks if not block.is_null]
        if ids:
            self._tell(oplog.HoldOp(blocks=ids))

    def evicted(self, answer: None, block_ids: list[int]) -> None:
        """`evict_blocks` returned."""
        self._tell(oplog.EvictOp(blocks=sorted(block_ids)))

    def reset(self, done: bool) -> None:
        """`reset_prefix_cache` returned."""
        self._tell(oplog.ResetOp(), oplog.Reset(done))

    def copied(self, copies: list[Any]) -> None:
        """`take_kv_cache_block_copies` returned; the scheduler gives the references back by itself."""
        if copies or self._header.partial_hits:
            pairs = [(copy.src_block_id, copy.dst_block_id) for copy in copies]
            self._tell(oplog.CopiesOp(hold=True), pairs)

    def zeroed(self, ids: list[int]) -> None:
        """`take_new_block_ids` returned; where nothing is zeroed, the scheduler makes no use of it."""
        if self._header.zeroing:
            self._tell(oplog.ZerosOp(), ids)

    def unwritten(self, answer: None, request_id: str, start_token: int) -> None:
        """`record_blocks_for_zeroing` returned."""
        tracked = self._requests.tracked.get(request_id)
        if tracked is not None and tracked.running and self._header.zeroing:
            self._tell(oplog.UnwrittenOp(id=tracked.name, tokens=start_token))

    def offered(self, offers: oplog.Offers) -> None:
        """`take_boundary_state_offloads` returned."""
        named: oplog.Offers = {}
        for id, states in offers.items():
            tracked = self._requests.tracked.get(id)
            if tracked is None:
                raise UntellableError(f"states of {id}, which is not there")
            named[tracked.name] = states
        self._tell(oplog.OffloadsOp(), named)

    def finalized(self, seen: Seen, in_flight: int, tails: list[oplog.Offer]) -> None:
        """`finalize_partial_tail_offloads` returned; a request that holds no blocks has no tails."""
        tracked = self._requests.up_to_date(seen)
        if tracked.running:
            self._tell(oplog.FinalizeOp(id=tracked.name, in_flight=max(0, in_flight)), tails)

    def drained(self, events: list[Any]) -> None:
        """`take_events` returned."""
        taken = [vllm_objects.event(event) for event in events]
        if not self._requests.identities_told:
            for event in taken:
                event.lora_name = event.extra_keys = None
        self._tell(oplog.EventsOp(), taken)


def _same(now: Mark, before: Mark) -> bool:
    """True if nothing changed, as far as both marks say."""
    if now[:2] != before[:2]:
        return False
    # Blocks are compared as objects: dataclasses would compare the whole queue that hangs on them.
    values = zip(now[2:], before[2:], strict=False)
    return all(a is b if hasattr(a, "block_id") else a == b for a, b in values)


def _changes(before: Mark, now: Mark) -> str:
    changes = [(name, _plain(old), _plain(new)) for name, old, new in zip(MARKS, before, now, strict=False)]
    return "; ".join(f"{name}: {str(a)[:60]} became {str(b)[:60]}" for name, a, b in changes if a != b)


def _plain(value: Any) -> Any:
    return getattr(value, "block_id", value)

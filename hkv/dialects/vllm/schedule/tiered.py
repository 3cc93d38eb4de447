"""A replay with a second tier: vLLM 0.33's schedule with offloading, its costs and benefits.

A waiting request is looked up on the GPU and then in the tier. What the tier has is loaded while others run; a request
of which a chunk is on its way is put aside until it is there. Each step stores the whole chunks that it computes.
Transfers take a step at least: a store begins with the step after, a load with the step itself. Where a bandwidth is
given, each direction moves one transfer after the other. `docs/second-tier.md` says what is modelled.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.offload.capacity import warnings
from hkv.dialects.vllm.offload.chunks import Absence, Chunks
from hkv.dialects.vllm.offload.config import OffloadConfig
from hkv.dialects.vllm.schedule.run import VllmReplayedCache, header
from hkv.dialects.vllm.schedule.schedule import Chunking, Diagnosis, Replay
from hkv.errors import ConfigError, EngineFailure
from hkv.replay import dispatches
from hkv.replay.agreement import compare, compare_outcomes
from hkv.replay.observed import Sampling
from hkv.replay.optimal import BoundedPool
from hkv.replay.run import COMPILED, REFERENCE, Outcome, Progress, ReplayedCache
from hkv.replay.schedule import Arrival, LiveRequest, Recorder, Refusal, Schedule
from reference.dialects.vllm import live as operations
from reference.dialects.vllm.connector import truncate
from reference.dialects.vllm.kinds.kind import Demand
from reference.dialects.vllm.offload.connector import Connector, Orders, Step
from reference.dialects.vllm.offload.lookup import chunks_of_hit

if TYPE_CHECKING:
    from hkv.dialects.vllm.schedule.tier_dispatches import TierReplay

MENDED = "Offloading without vLLM's defects"
"""Name of the change that takes those away that `hkv.dialects.vllm.offload.config.BUGS` names."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tier:
    """A second tier, and how fast it is.

    Attributes:
      config: the tier next to its cache.
      chunk_bytes: bytes of a chunk on one worker; 0 where a replay knows none.
      copies: workers whose blocks a chunk holds; fewer than all where they hold the same.
      step_bytes: bytes that a worker moves in a step, in each direction; None for any number.
      step_tokens: prompt tokens that would be computed in a step, of a GPU at work; None where nobody says.
    """

    config: OffloadConfig
    chunk_bytes: int = 0
    copies: int = 1
    step_bytes: int | None = None
    step_tokens: float | None = None

    def saved(self, tokens: int, chunks: int) -> float:
        """Steps in which so many loaded tokens would have been computed, less those in which chunks were moved."""
        assert self.step_bytes
        assert self.step_tokens
        return tokens / self.step_tokens - chunks * self.chunk_bytes / self.step_bytes


class TieredCache(VllmReplayedCache):
    """A cache with a second tier, for a replay to study."""

    def __init__(self, config: VllmConfig, tier: Tier) -> None:
        super().__init__(config)
        self.tier = tier
        # Most hits that any choice of evictions could find: content is on the GPU or in the tier, which runs nothing.
        chunks = tier.config.num_chunks
        self.pools = (BoundedPool(self.blocks + chunks, config.topology.specs, reserve=chunks),)
        self.finer = self.hit_units.unit - 1

    def changed(self, tokens: int, requests: int, schedule: Schedule) -> Mapping[str, ReplayedCache]:
        mended = Tier(**{**vars(self.tier), "config": dataclasses.replace(self.tier.config, bugs=frozenset())})
        found = {} if not self.tier.config.bugs else {MENDED: TieredCache(self.config, mended)}
        return {**super().changed(tokens, requests, schedule), **found}

    def warnings(self, longest: int) -> Sequence[str]:
        return warnings(self.tier.config, longest)

    def require_compiled(self) -> None:
        from hkv.dialects.vllm.schedule import tier_dispatches

        super().require_compiled()
        tier_dispatches.require(self.tier.config)

    def compiled(self, schedule: Schedule, coming: Sequence[Arrival], check: bool, progress: Progress) -> Outcome:
        self.require_compiled()
        prepared, factor = dispatches.incoming(coming, schedule.max_model_len), 1
        while True:
            running = self._begun(schedule, prepared, check, factor)
            started = time.perf_counter()
            try:
                steps = running.run((lambda: None) if check else progress, self.tells, self.asks)
            except EngineFailure:
                if running.blocked is not None:
                    raise no_way_out(self.config.num_blocks, running.blocked) from None
                if not running.overflowed:
                    raise
                factor *= 2  # more requests waited for loads, or more stores went on, than there was room for
                continue
            outcome = self.ran(running, schedule, steps, time.perf_counter() - started)
            if check:
                again = [dataclasses.replace(arrival, keys=prepared.keys_of(arrival.index)) for arrival in coming]
                self.verify(running, outcome, schedule, again, progress)
            return outcome

    def _begun(self, schedule: Schedule, prepared: Any, check: bool, factor: int) -> TierReplay:
        from hkv.dialects.vllm.schedule import tier_dispatches

        largest = dataclasses.replace(self.config, num_blocks=max(self.config.num_blocks, self.room))
        sizes = tier_dispatches.sizes_of(largest, schedule, prepared, factor)
        more = {"diagnose": self.diagnoses or check, "sampling": self._samples()}
        return tier_dispatches.TierReplay(
            self.tier, schedule, prepared, sizes=sizes, jobs=factor * tier_dispatches.JOBS, **more
        )

    def verify(
        self,
        running: Any,
        outcome: Outcome,
        schedule: Schedule,
        coming: Sequence[Arrival],
        progress: Progress = lambda: None,
    ) -> None:
        names, reference = (COMPILED, REFERENCE), NumpyEngine(header(self.config))
        recorder = Recorder(self.config.num_blocks, Diagnosis(self.config, reference.manager), progress)
        loop = TieredReplay(self.tier, reference, schedule, coming, recorder, self._samples(), len(self.groups))
        other = self.ran(loop, schedule, loop.run(), 0.0)
        compare_outcomes(outcome, other, names)
        compare("order of eviction", running.order(), loop.order(), names)
        self.compare_ends(running, reference, names)

    def loop(
        self, schedule: Schedule, coming: Iterable[Arrival], driven: Any, oracle: Any, progress: Progress
    ) -> Replay:
        if not isinstance(driven, NumpyEngine):
            raise ConfigError("engine", type(driven).__name__, f"{REFERENCE}: with a second tier")
        recorder = Recorder(self.config.num_blocks, Diagnosis(self.config, driven.manager), progress)
        return TieredReplay(self.tier, driven, schedule, coming, recorder, self._samples(), len(self.groups))

    def rows(self, totals: Mapping[str, Any]) -> Sequence[tuple[str, Any, str]]:
        size = self.tier.chunk_bytes * self.tier.copies

        def amount(chunks: int) -> str:
            return f"{chunks * size / 2**30:,.1f} GiB" if size else "chunks"

        hits, loaded = totals["hit_tokens"], totals["loaded_tokens"]
        prompt = max(totals["prompt_tokens"], 1)
        stored, read = totals["tier_stored"], totals["tier_read"]
        lacked = totals["tier_lacked"]
        said = ", ".join(f"{tokens:,} {reason}" for reason, tokens in lacked.items() if tokens) or "none"
        rows = [
            ("hit on the GPU", f"{(hits - loaded) / prompt:.2%}", f"{hits - loaded:,} tokens"),
            ("hit in the tier", f"{loaded / prompt:.2%}", f"{loaded:,} tokens, loaded"),
            ("tier, peak", totals["tier_peak"], f"of {self.tier.config.num_chunks:,} chunks"),
            ("stored", stored, amount(stored)),
            ("loaded", totals["tier_loaded"], amount(totals["tier_loaded"])),
            ("stored, never read", stored - read, amount(stored - read)),
            ("evicted from the tier", totals["tier_evicted"], amount(totals["tier_evicted"])),
            ("stores without room", totals["tier_refused"], "offered again with the next step"),
            ("stores flushed", totals["tier_flushed"], "their blocks were handed out, and a step waited"),
            ("waited for chunks", totals["tier_waits"], f"requests, {totals['tier_wait_steps']:,} steps together"),
            ("waited for loads", totals["tier_loads"], f"requests, {totals['tier_load_steps']:,} steps together"),
            ("tier lacked", sum(lacked.values()), f"tokens computed before: {said}"),
        ]
        if (slower := totals["tier_slower_loads"]) is not None:
            saved = f"{totals['tier_saved_steps']:,.0f} steps of prefill saved less their loads"
            rows.append(("loads slower", slower, f"than computing again; {saved}"))
        return rows


def no_way_out(num_blocks: int, step: int) -> ConfigError:
    """The error of a replay whose requests hold what was loaded for them, and wait for each other's blocks for good."""
    wanted = f"room for what requests need beyond their loads: from step {step} on they wait for each other's blocks"
    return ConfigError("num_blocks", num_blocks, f"{wanted} for good, as vLLM 0.33's scheduler would have them")


@dataclasses.dataclass
class _Load:
    """A request that waits with blocks. `ended`: its load has; `settled`: what was loaded has been registered."""

    began: int
    ended: bool = False
    settled: bool = False


class _Link:
    """Transfers in one direction, one after the other."""

    def __init__(self, step_bytes: int | None) -> None:
        self._rate, self._free = step_bytes, 0

    def end(self, step: int, size: int) -> int:
        """The step at whose end a transfer is done that may begin with `step`."""
        if self._rate is None:
            return step
        self._free = max(self._free, step * self._rate) + size
        return max(step, -(-self._free // self._rate) - 1)


class TieredReplay(Replay):
    """Drives the reference through a trace as vLLM 0.33's scheduler would with its offloading connector."""

    def __init__(
        self,
        tier: Tier,
        engine: NumpyEngine,
        schedule: Schedule,
        arrivals: Iterable[Arrival],
        observer: Recorder,
        sampling: Sampling | None = None,
        groups: int = 0,
    ) -> None:
        config = tier.config
        chunking = Chunking.of(config.cache, schedule.step_tokens)
        super().__init__(engine, schedule, chunking, arrivals, observer, sampling, groups)
        self._tier, self._manager, self._connector = tier, engine.manager, Connector(config)
        self._chunks = Chunks(config.num_chunks, config.policy, config.threshold, config.tracked)
        self._connector.pool = self._chunks  # type: ignore[assignment]
        self._loads, self._stores = _Link(tier.step_bytes), _Link(tier.step_bytes)
        self._holding: collections.deque[LiveRequest] = collections.deque()
        self._held: dict[str, _Load] = {}
        self._prefilling: dict[str, LiveRequest] = {}
        self._ended_ids: list[str] = []
        self._preempted: dict[str, None] = {}
        self._due: list[tuple[int, int]] = []
        self._now = 0
        self._counts: collections.Counter[str] = collections.Counter()
        self._lacked: collections.Counter[str] = collections.Counter()
        self._waited: set[str] = set()
        self._clear()

    def order(self) -> list[int]:
        """Chunks that none uses that goes on, the next to leave first, whatever transfers read or write them."""
        return self._chunks.settled()

    def left(self) -> dict[str, Any]:
        counts, told = self._chunks.counts, self._tier.step_bytes and self._tier.step_tokens
        names = ("stored", "read", "loaded", "evicted", "refused", "peak")
        extra = {f"tier_{name}": getattr(counts, name) for name in names}
        extra |= {f"tier_{name}": self._counts[name] for name in ("flushed", "wait_steps", "loads", "load_steps")}
        extra |= {
            "tier_waits": len(self._waited),
            "tier_lacked": {each.value: self._lacked[each.value] for each in Absence},
            "tier_stored_bytes": counts.stored * self._tier.chunk_bytes * self._tier.copies,
            "tier_loaded_bytes": counts.loaded * self._tier.chunk_bytes * self._tier.copies,
            "tier_slower_loads": self._counts["slower"] if told else None,
            "tier_saved_steps": self._tier.saved(self._counts["tokens"], self._counts["chunks"]) if told else None,
        }
        return {**super().left(), "extra": extra}

    # Requests.

    def _present(self) -> int:
        return super()._present() + len(self._holding)

    def _blocks_return(self) -> bool:
        return bool(self._running or self._holding)

    def _request(self, live: LiveRequest) -> None:
        super()._request(live)
        self._connector.arrive(self._manager.requests[live.id])

    def _free(self, live: LiveRequest, *, finished: bool) -> None:
        self._prefilling.pop(live.id, None)
        if finished:
            self._finish(live)
        else:
            self._preempted[live.id] = None
        super()._free(live, finished=finished)

    def _finish(self, live: LiveRequest) -> None:
        """A request is about to give its blocks back for good; the last of its chunks are stored with the next step."""
        if live.tokens < live.arrival.prompt + live.arrival.output:
            self._extend(live, 1)  # its last token is known, and not computed
        if self._tier.config.cache.offloads:
            operations.finalize(self._manager, live.id, 0)
        operations.retire(self._manager, live.id, live.computed)
        self._connector.finish(live.id)
        self._ended_ids.append(live.id)

    def _drop(self, live: LiveRequest) -> None:
        if not self._connector.requests[live.id].finished:
            self._connector.finish(live.id, aborted=True)
            self._ended_ids.append(live.id)
        super()._drop(live)

    # A step.

    def _clear(self) -> None:
        self._scheduled: dict[str, int] = {}
        self._grown: list[tuple[str, list[list[int]] | None, bool]] = []
        self._came: list[tuple[str, list[list[int]] | None, bool]] = []
        self._returned: list[tuple[str, list[list[int]] | None, bool]] = []

    def _step(self, step: int) -> None:
        self._now = step
        self._deliver(step - 1)
        super()._step(step)
        self._deliver(step)

    def _rest(self, step: int) -> None:
        self._now = step
        if self._ended_ids:
            self._order()

    def _planned(self) -> None:
        self._order()

    def _order(self) -> None:
        """Tells the connector of the step, and begins the transfers that it orders."""
        targets = [target for _, target in self._manager.copies()]
        offers = operations.offloads(self._manager) if self._tier.config.cache.offloads else {}
        tables = [*self._came, *self._grown, *self._returned]
        ended, preempted = sorted(self._ended_ids), sorted(self._preempted)  # vLLM's sets of names have no order
        self._ended_ids = []
        orders = self._connector.step(Step(self._scheduled, tables, ended, preempted, targets, offers))
        self._preempted.clear()
        self._clear()
        self._begin_transfers(orders)

    def _begin_transfers(self, orders: Orders) -> None:
        size = self._tier.chunk_bytes
        for transfer in orders.loads:
            end = self._loads.end(self._now, len(transfer.chunks) * size)
            heapq.heappush(self._due, (end, transfer.job))
        for transfer in orders.stores:
            end = self._stores.end(self._now + 1, len(transfer.chunks) * size)
            heapq.heappush(self._due, (end, transfer.job))
        for job in sorted(orders.flushed):  # their reports come at this step's end; the later ones say nothing new
            self._counts["flushed"] += 1
            heapq.heappush(self._due, (self._now, job))

    def _deliver(self, step: int) -> None:
        """Reports of transfers that were done by the end of a step."""
        while self._due and self._due[0][0] <= step:
            _, number = heapq.heappop(self._due)
            job = self._connector.jobs.get(number)
            if job is None:
                continue
            self._connector.report(number, job.left)
            if not job.writes and (load := self._held.get(job.owner.request.id)) is not None:
                load.ended = True

    def _grow(self, live: LiveRequest, new: int) -> bool:
        blocks = self._manager.allocate(live.id, new, lookahead=self._schedule.lookahead, waiting=False)
        if blocks is None:
            return False
        self._scheduled[live.id] = new
        self._grown.append((live.id, blocks if any(blocks) else None, False))
        return True

    def _advance(self, live: LiveRequest, tokens: int) -> None:
        super()._advance(live, tokens)
        if live.computed + tokens >= live.tokens:
            self._prefilling.pop(live.id, None)

    # Admission.

    def _admit_waiting(self, step: int, budget: int, scheduled: list[tuple[LiveRequest, int]]) -> None:
        """Admits from the heads of the queues on: first requests that hold blocks, then the others."""
        aside: tuple[list[LiveRequest], list[LiveRequest]] = ([], [])
        while budget and len(self._running) < self._schedule.max_running:
            queue = self._holding or self._waiting
            if not queue:
                break
            live = queue[0]
            answer = self._admit(live, budget)
            if answer is Refusal.LATER:
                break
            if answer is Refusal.PUT_OFF and (
                self._running or len(self._holding) > (queue is self._holding) or aside[1]
            ):
                if queue is self._holding and not self._running and not aside[1]:
                    # Nothing runs that could give blocks back, and no load that goes on stands before this request.
                    raise no_way_out(self._tier.config.cache.num_blocks, step)
                self._observer.put_off()
                break
            queue.popleft()
            if answer is Refusal.ASIDE:
                aside[live.id in self._held].append(live)
            elif isinstance(answer, Refusal):
                if self._held.pop(live.id, None) is not None:
                    self._free(live, finished=False)
                self._refuse_for_good(step, live)
            else:
                self._running.append(live)
                scheduled.append((live, answer[1]))
                budget -= answer[1]
        self._waiting.extendleft(reversed(aside[0]))
        self._holding.extendleft(reversed(aside[1]))

    def _admit(self, live: LiveRequest, budget: int) -> tuple[int, int] | Refusal:
        if (load := self._held.get(live.id)) is not None:
            return self._go_on(live, load, budget)
        manager, unit = self._manager, self._tier.config.cache.scheduler_block_size
        found = manager.lookup(live.id)
        live.shared_boundary = manager.requests[live.id].shared_prefix = found.shared_prefix
        rows, local, external = found.blocks, found.hit, 0
        matched, _ = self._connector.match(live.id, local - local % unit)
        if matched is None:
            self._counts["wait_steps"] += 1
            self._waited.add(live.id)
            return Refusal.ASIDE
        if matched > local % unit:
            if local % unit:
                local -= local % unit
                rows = truncate(manager, rows, local)
            external = matched
        start, new = local + external, 0
        if not external:
            new = self._chunking.tokens(live.arrival.prompt, live.tokens, live.shared_boundary, start, budget)
            if not new:
                return Refusal.LATER
        self._observer.looked_up(live, start)
        if not self._allocate(live, new, local, rows, external):
            return Refusal.PUT_OFF
        if not live.preemptions:
            self._note_missing(live, start)
        self._observer.admitted(self._now, live, start, external)
        live.computed = start
        operations.computed(manager, live.id, start)
        if external:
            self._held[live.id] = _Load(self._now)
            self._prefilling[live.id] = live
            self._note_load(live, local, external)
            return Refusal.ASIDE
        self._runs(live, new)
        return start, new

    def _allocate(self, live: LiveRequest, new: int, local: int, rows: Sequence[Sequence[int]], external: int) -> bool:
        manager = self._manager
        given = manager.allocate(
            live.id,
            new,
            hit=local,
            lookahead=0 if external else self._schedule.lookahead,
            external=external,
            delay=bool(external),
            must_fit=True,
            reserved=self._reserved() if external else 0,
            shared_prefix=live.shared_boundary,
            rows=rows if local else None,
            waiting=True,
            scheduled=bool(self._running),
        )
        if given is None:
            return False
        primary = manager.pool.primary
        self._connector.allocated(live.id, manager.rows(live.id), external, lambda block: primary[block] is not None)
        return True

    def _go_on(self, live: LiveRequest, load: _Load, budget: int) -> tuple[int, int] | Refusal:
        """A request whose blocks are loaded; it runs once they are, and all of its tokens but the last may be there."""
        if not load.ended:
            return Refusal.ASIDE
        manager = self._manager
        if not load.settled:
            load.settled = True
            manager.commit(live.id, live.computed, checked=False)
            if live.computed == live.tokens:
                live.computed -= 1
                operations.computed(manager, live.id, live.computed)
        new = self._chunking.tokens(live.arrival.prompt, live.tokens, live.shared_boundary, live.computed, budget)
        if not new:
            return Refusal.LATER
        if not self._allocate(live, new, 0, (), 0):
            return Refusal.PUT_OFF
        self._counts["load_steps"] += self._now - load.began
        del self._held[live.id]
        self._runs(live, new)
        return live.computed, new

    def _runs(self, live: LiveRequest, new: int) -> None:
        self._scheduled[live.id] = new
        tables = self._returned if live.preemptions else self._came
        tables.append((live.id, self._manager.rows(live.id), True))
        if live.computed + new < live.tokens:
            self._prefilling[live.id] = live

    def _reserved(self) -> int:
        """Blocks that requests on the way to their last token still need, loads among them."""
        cache, total = self._manager.cache, 0
        for id in self._prefilling:
            request = self._manager.requests[id]
            length = min(request.num_tokens, cache.config.max_model_len)
            end = request.prefill_end if cache.config.retention_interval == 0 else 0
            demand = Demand(length, length, request.num_computed, request.num_computed, end, whole=True)
            total += sum(kind.estimate(id, [], kind.concerning(demand)) for kind in cache.kinds)
        return total

    # Figures.

    def _note_load(self, live: LiveRequest, local: int, external: int) -> None:
        self._counts["loads"] += 1
        if self._tier.step_bytes and self._tier.step_tokens:
            chunks = len(self._connector.jobs[max(self._connector.requests[live.id].jobs)].keys)
            load = chunks * self._tier.chunk_bytes / self._tier.step_bytes
            self._counts["slower"] += load > external / self._tier.step_tokens
            self._counts["tokens"] += external
            self._counts["chunks"] += chunks

    def _note_missing(self, live: LiveRequest, hit: int) -> None:
        """Notes why the tier did not bring what a pool that evicts nothing has: the first chunk that is not there."""
        asked = live.arrival.asked
        if asked <= hit:
            return
        state = self._connector.requests[live.id]
        for key in chunks_of_hit(self._tier.config, state.keys, hit, asked):
            reason = self._chunks.absence(key)
            if reason is not None:
                self._lacked[reason.value] += asked - hit
                return

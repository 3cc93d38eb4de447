"""A replay with a second tier: vLLM 0.33's schedule with offloading, step by step.

A waiting request is looked up on the GPU and then in the tier. What the tier has is loaded while others run; a request
of which a chunk is on its way is put aside until it is there. Each step stores the whole chunks that it computes.
Transfers take a step at least: a store begins with the step after, a load with the step itself. Where a bandwidth is
given, each direction moves one transfer after the other. `docs/second-tier.md` says what is modelled.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
from collections.abc import Iterable, Sequence
from typing import Any

from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.offload.config import ALL_OR_NOTHING, OWN_HEAD
from hkv.dialects.vllm.offload.connector import Connector, Orders, Step
from hkv.dialects.vllm.schedule.schedule import Chunking, Replay
from hkv.dialects.vllm.schedule.tier import Link, Tier
from hkv.errors import ConfigError
from hkv.replay.observed import Sampling
from hkv.replay.schedule import Arrival, LiveRequest, Recorder, Refusal, Schedule
from reference.dialects.vllm import live as operations
from reference.dialects.vllm.connector import truncate
from reference.dialects.vllm.kinds.kind import Demand


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
        self._tier, self._manager = tier, engine.manager
        # vLLM's ways with a tier that is too small, whatever the defects.
        bugs = config.bugs | {OWN_HEAD, ALL_OR_NOTHING}
        self._connector = Connector(dataclasses.replace(config, bugs=bugs))
        self._chunks = self._connector.pool
        self._loads, self._stores = Link(tier.step_bytes), Link(tier.step_bytes)
        self._holding: collections.deque[LiveRequest] = collections.deque()
        self._held: dict[str, _Load] = {}
        self._prefilling: dict[str, LiveRequest] = {}
        self._ended_ids: list[str] = []
        self._preempted: dict[str, None] = {}
        self._due: list[tuple[int, int]] = []
        self._now = 0
        self._counts: collections.Counter[str] = collections.Counter()
        self._waited: set[str] = set()
        self._ahead = 0  # slots beyond its tokens that a step may want of a request
        self._clear()

    def order(self) -> list[int]:
        """Chunks that none uses that goes on, the next to leave first, whatever transfers read or write them."""
        return self._chunks.settled()

    def left(self) -> dict[str, Any]:
        counts, told = self._chunks.counts, self._tier.step_bytes and self._tier.step_tokens
        moved = (self._counts["tokens"], self._counts["chunks"], self._counts["loads"])
        names = ("stored", "read", "loaded", "evicted", "refused", "peak")
        extra = {f"tier_{name}": getattr(counts, name) for name in names}
        extra |= {f"tier_{name}": self._counts[name] for name in ("flushed", "wait_steps", "loads", "load_steps")}
        extra |= {
            "tier_waits": len(self._waited),
            "tier_stored_bytes": counts.stored * self._tier.chunk_bytes * self._tier.copies,
            "tier_loaded_bytes": counts.loaded * self._tier.chunk_bytes * self._tier.copies,
            "tier_slower_loads": self._counts["slower"] if told else None,
            "tier_saved_steps": self._tier.saved(*moved) if told else None,
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
        # Those that ended are told of with the next step: a step of its own, unless a request has come for it.
        if self._ended_ids and not (self._next is not None and self._is_due(self._next, step)):
            self._order()

    def _planned(self) -> None:
        self._order()

    def _order(self) -> None:
        """Tells the connector of the step, and begins the transfers that it orders."""
        # States are taken before the copies that they may be made by.
        offers = operations.offloads(self._manager) if self._tier.config.cache.offloads else {}
        targets = [target for _, target in self._manager.copies()]
        tables = [*self._came, *self._grown, *self._returned]
        ended, preempted = sorted(self._ended_ids), sorted(self._preempted)  # vLLM's sets of names have no order
        self._ended_ids = []
        orders = self._connector.step(Step(self._scheduled, tables, ended, preempted, targets, offers))
        self._preempted.clear()
        self._clear()
        self._begin_transfers(orders)

    def _begin_transfers(self, orders: Orders) -> None:
        for transfer in orders.loads:
            end = self._loads.end(self._now, self._tier.moved(len(transfer.chunks)))
            heapq.heappush(self._due, (end, transfer.job))
        for transfer in orders.stores:
            end = self._stores.end(self._now + 1, self._tier.moved(len(transfer.chunks)))
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
            new = self._opening(live, start, budget)
            if not new:
                return Refusal.LATER
        self._observer.looked_up(live, start)
        if not self._allocate(live, new, local, rows, external):
            return Refusal.PUT_OFF
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
        new = self._opening(live, live.computed, budget)
        if not new:
            return Refusal.LATER
        if not self._allocate(live, new, 0, (), 0):
            return Refusal.PUT_OFF
        self._counts["load_steps"] += self._now - load.began
        del self._held[live.id]
        self._runs(live, new)
        return live.computed, new

    def _opening(self, live: LiveRequest, start: int, budget: int) -> int:
        """Tokens that a request computes first, of which `start` are there; 0 to wait for the next step."""
        return self._chunking.tokens(live.arrival.prompt, live.tokens, live.shared_boundary, start, budget)

    def _runs(self, live: LiveRequest, new: int) -> None:
        self._scheduled[live.id] = new
        tables = self._returned if live.preemptions else self._came
        tables.append((live.id, self._manager.rows(live.id), True))
        if live.computed + new < live.tokens:
            self._prefilling[live.id] = live

    def _reserved(self) -> int:
        """Blocks that requests on the way to their last token still need, loads among them, and its drafts."""
        cache, ahead = self._manager.cache, self._ahead
        specs, sizes = cache.config.topology.specs, cache.config.block_sizes
        total = sum(-(-ahead // size) for spec, size in zip(specs, sizes, strict=True) if not spec.snapshot)
        for id in self._prefilling:
            request = self._manager.requests[id]
            length = min(request.num_tokens, cache.config.max_model_len)
            end = request.prefill_end if cache.config.retention_interval == 0 else 0
            demand = Demand(length + ahead, length, request.num_computed, request.num_computed, end, whole=True)
            total += sum(kind.estimate(id, [], kind.concerning(demand)) for kind in cache.kinds)
        return total

    # Figures.

    def _note_load(self, live: LiveRequest, local: int, external: int) -> None:
        self._counts["loads"] += 1
        if self._tier.step_bytes and self._tier.step_tokens:
            chunks = len(self._connector.jobs[max(self._connector.requests[live.id].jobs)].keys)
            load = self._tier.moved(chunks) / self._tier.step_bytes
            self._counts["slower"] += load > external / self._tier.step_tokens
            self._counts["tokens"] += external
            self._counts["chunks"] += chunks

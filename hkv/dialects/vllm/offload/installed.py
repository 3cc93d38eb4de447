"""Drives an installed vLLM's own offloading, so that HKV can be held against the engine it describes.

A pool by itself is its `CPUOffloadingManager`. A scheduler is its `Scheduler` with the real `OffloadingConnector` on a
CPU; there is no worker, no model and no memory: `Workers` reports jobs when the log says so, and tokens are counted.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import abc
import traceback
from typing import Any

from hkv.dialects.vllm.engines import vllm_objects
from hkv.dialects.vllm.engines.installed import require_vllm
from hkv.dialects.vllm.offload import log as structs
from hkv.dialects.vllm.offload.config import BUGS, SIMPLE
from hkv.dialects.vllm.offload.lifecycle import PoolLifecycle, SchedulerLifecycle
from hkv.dialects.vllm.offload.workers import Workers
from hkv.errors import ConfigError, OperationError

RELEASE = "0.33.0"

FAILURES = (AssertionError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""Errors that vLLM raises where it fails."""


def engine(header: structs.Header, release: str | None = None) -> InstalledPool | InstalledScheduler:
    """An installed vLLM's own objects for what a header describes: a pool by itself, or a scheduler.

    Args:
      header: the configuration, as a log's first line.
      release: the version that vLLM must have, whatever its rules; None for 0.33.0.

    Raises:
      ConfigError: vLLM is not installed, or another release of it; a tier that it does not have;
        defects of 0.33.0 that the header does not name.
    """
    require_vllm(release or RELEASE)
    structs.to_config(header)
    if header.dialect == structs.OFFLOAD and set(header.bugs) != set(BUGS):
        raise ConfigError("bugs", header.bugs, f"those of vLLM {RELEASE}: {', '.join(BUGS)}")
    if header.dialect == structs.CHUNKS:
        return InstalledPool(header)
    if header.connector == SIMPLE:
        return InstalledSimple(header)
    return InstalledScheduler(header)


class _Installed(abc.ABC):
    """Performs operations that may come now, and tells of failures of vLLM's."""

    _lifecycle: PoolLifecycle | SchedulerLifecycle

    @abc.abstractmethod
    def _answer(self, operation: structs.Operation) -> Any:
        """The answer of vLLM's own objects."""

    def perform(self, operation: structs.Operation) -> Any:
        """Performs one operation and returns its answer.

        Raises:
          OperationError: it cannot come now, or vLLM fails.
        """
        self._lifecycle.follow(operation)
        try:
            answer = self._answer(operation)
        except FAILURES as error:
            raise failed(operation, error) from error
        self._lifecycle.answered(operation, answer)
        return answer


class InstalledPool(_Installed):
    """vLLM 0.33.0's `CPUOffloadingManager` by itself."""

    def __init__(self, header: structs.Header) -> None:
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        self._manager = CPUOffloadingManager(
            header.num_blocks[-1],
            header.policy,
            enable_events=True,
            store_threshold=header.threshold,
            max_tracker_size=header.tracked,
        )
        self._lifecycle = PoolLifecycle()
        self._contexts: dict[str, Any] = {}
        self._jobs: dict[int, tuple[bool, list[bytes], Any]] = {}

    def _answer(self, operation: structs.Operation) -> Any:
        from vllm.v1.kv_offload.base import ReqContext

        manager = self._manager
        match operation:
            case structs.BeginOp():
                context = self._contexts[operation.id] = ReqContext(req_id=operation.id)
                manager.on_new_request(context)
            case structs.StoreOp():
                return self._store(operation)
            case structs.LoadOp():
                context, keys = self._named(operation)
                self._jobs[operation.job] = (False, keys, context)
                return structs.Loaded(manager.prepare_load(keys, context).chunk_ids.tolist())
            case structs.DoneOp():
                writes, keys, context = self._jobs.pop(operation.job)
                if writes:
                    manager.complete_store(keys, context, success=not operation.failed)
                else:
                    manager.complete_load(keys, context)
            case structs.EndOp():
                manager.on_request_finished(self._contexts.pop(operation.id))
            case structs.ClearOp():
                manager.reset_cache()
                self._jobs.clear()
            case structs.EventsOp():
                return [pool_event(event, name_of) for event in manager.take_events()]
            case _:
                return structs.State(pool_state(manager, name_of))
        return None

    def _store(self, operation: structs.StoreOp) -> structs.Stored:
        context, keys = self._named(operation)
        stored = self._manager.prepare_store(keys, context)
        if stored is None:
            return structs.Stored(None, [], [])
        if stored.keys_to_store:
            self._jobs[operation.job] = (True, stored.keys_to_store, context)
        written, evicted = ([name_of(key) for key in each] for each in (stored.keys_to_store, stored.evicted_keys))
        return structs.Stored(written, stored.store_spec.chunk_ids.tolist(), evicted)

    def _named(self, operation: structs.StoreOp | structs.LoadOp) -> tuple[Any, list[bytes]]:
        from vllm.v1.kv_offload.base import make_offload_key

        context = self._contexts[operation.id]
        keys = []
        for name, group, end in operation.keys:
            keys.append(make_offload_key(name.encode(), group))
            context.set_offload_key_position(keys[-1], end)
        return context, keys


def failed(operation: structs.Operation, error: Exception) -> OperationError:
    """The error that tells of a failure of vLLM's, and where it is."""
    place = traceback.extract_tb(error.__traceback__)[-1].name
    said = " ".join(str(error).split()) or "no message"
    return OperationError(type(operation).__name__, place, f"vLLM not to raise {type(error).__name__}: {said}")


class InstalledScheduler(_Installed):
    """vLLM 0.33.0's `Scheduler` with its `OffloadingConnector`."""

    def __init__(self, header: structs.Header) -> None:
        from hkv.dialects.vllm.offload import vllm_scheduler

        self._objects = vllm_scheduler
        self._scheduler, self._hasher = vllm_scheduler.scheduler(structs.to_config(header))
        self._lifecycle = SchedulerLifecycle(header)
        self._workers = Workers(header.workers)
        self._matches: list[structs.Match] = []
        self._refused = 0
        self._events: list[Any] = []
        self._find_tier()

    def _answer(self, operation: structs.Operation) -> Any:
        match operation:
            case structs.RequestOp():
                self._scheduler.add_request(self._objects.request(operation, self._hasher))
            case structs.StepOp():
                return self._step(operation)
            case structs.AbortOp():
                self._objects.abort(self._scheduler, operation.id)
            case structs.ResetOp():
                given = {"reset_running_requests": operation.preempt, "reset_connector": operation.tier}
                done = self._scheduler.reset_prefix_cache(**given)
                return structs.Reset(bool(done))
            case _:
                return self._state()
        return None

    def _step(self, operation: structs.StepOp) -> structs.Stepped:
        scheduler = self._scheduler
        self._matches = []
        scheduler.finished_req_ids = self._objects.Sorted(scheduler.finished_req_ids)
        output = scheduler.schedule()
        loads, stores, flushed = self._orders(output.kv_connector_metadata)
        reported = self._workers.report(
            [(each.job, each.id, each.within) for each in loads],
            [each.job for each in stores],
            flushed,
            operation.reports,
            operation.at_once,
        )
        finished = self._objects.output(scheduler, output, reported.received, self._completed(reported.jobs))
        events = [pool_event(event, hash_name_of) for event in self._events]
        self._events = []
        return structs.Stepped(
            self._matches,
            dict(output.num_scheduled_tokens),
            sorted(output.preempted_req_ids or ()),
            loads,
            stores,
            flushed,
            finished,
            events,
            self._refused,
        )

    def _orders(self, orders: Any) -> tuple[list[structs.Transfer], list[structs.Transfer], list[int]]:
        """Loads and stores of a step, and the jobs that are finished before it."""
        loads = [self._transfer(job, each) for job, each in orders.load_jobs.items()]
        stores = [self._transfer(job, each) for job, each in orders.store_jobs.items()]
        return loads, stores, sorted(orders.jobs_to_flush or ())

    def _completed(self, jobs: dict[int, int]) -> Any:
        """Reports of workers on jobs."""
        return self._objects.completed(jobs)

    def _transfer(self, number: int, job: Any) -> structs.Transfer:
        blocks, chunks = (
            (job.src_spec, job.dst_spec) if hasattr(job.src_spec, "group_sizes") else (job.dst_spec, job.src_spec)
        )
        return structs.Transfer(
            number,
            job.req_id,
            [int(each) for each in chunks.chunk_ids],
            [int(each) for each in blocks.block_ids],
            [int(each) for each in blocks.group_sizes],
            [int(each) for each in blocks.block_indices],
            bool(job.sync),
        )

    def _find_tier(self) -> None:
        """Finds the tier, and has lookups, refused stores and its pool's events noted as they are made."""
        self._tier = self._scheduler.connector.connector_scheduler
        self._note_lookups()
        manager = self._tier.manager
        store, take = manager.prepare_store, manager.take_events

        def storing(keys: Any, context: Any) -> Any:
            stored = store(keys, context)
            self._refused += stored is None
            return stored

        def taking() -> Any:
            events = list(take())
            self._events += events
            return events

        manager.prepare_store, manager.take_events = storing, taking

    def _note_lookups(self) -> None:
        connector = self._scheduler.connector
        match = connector.get_num_new_matched_tokens

        def matching(request: Any, local: int) -> Any:
            external, later = match(request, local)
            self._matches.append(structs.Match(request.request_id, local, external, later))
            return external, later

        connector.get_num_new_matched_tokens = matching

    def _held(self, request: Any, blocks: Any, cursors: list[int], jobs: Any) -> structs.Held:
        rows = self._objects.ids(self._scheduler.kv_cache_manager.coordinator.get_blocks(request.request_id))
        return structs.Held(request.num_computed_tokens, rows, blocks, cursors, sorted(jobs))

    def _tier_state(self) -> tuple[structs.PoolState, dict[str, structs.Held], dict[str, list[int]]]:
        """State of the tier's pool, its requests, and blocks of the GPU that wait for jobs."""
        tier = self._tier
        requests = {
            id: self._held(
                state.req,
                [
                    group.block_ids[group.next_stored_chunk_idx * tier.config.blocks_per_chunk :]
                    for group in state.group_states
                ],
                [group.next_stored_chunk_idx for group in state.group_states],
                state.transfer_jobs,
            )
            for id, state in tier._req_status.items()
        }
        fences = {str(block): sorted(jobs) for block, jobs in sorted(tier._block_id_to_pending_jobs.items())}
        return pool_state(tier.manager, hash_name_of), requests, fences

    def _state(self) -> structs.State:
        scheduler = self._scheduler
        running, waiting, holding = (
            [request.request_id for request in queue]
            for queue in (scheduler.running, scheduler.waiting, scheduler.kv_holding_waiting)
        )
        queue = scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()
        pool, requests, fences = self._tier_state()
        free = [block.block_id for block in queue]
        return structs.State(pool, structs.SchedulerState(running, waiting, holding, free, requests, fences))


class InstalledSimple(InstalledScheduler):
    """vLLM 0.33.0's `Scheduler` with its `SimpleCPUOffloadConnector`, whose tier is a pool of blocks.

    Its jobs have no numbers: all stores of a step are one event, all loads another, and each load ends by its request's
    name. They get numbers here, the store of a step before its loads.
    """

    def _find_tier(self) -> None:
        self._tier = self._scheduler.connector.scheduler_manager
        self._note_lookups()
        self._number = 0
        self._events_of: dict[int, int] = {}
        self._jobs_of: dict[int, int] = {}

    def _orders(self, orders: Any) -> tuple[list[structs.Transfer], list[structs.Transfer], list[int]]:
        flushed = sorted(self._workers.left) if orders.need_flush else []
        loads, stores = list[structs.Transfer](), list[structs.Transfer]()
        if orders.store_event >= 0:
            number = self._next()
            self._events_of[number], self._jobs_of[orders.store_event] = orders.store_event, number
            stores.append(self._copies(number, "", orders.store_cpu_blocks, orders.store_gpu_blocks))
        for id, state in self._tier._reqs_to_load.items():
            if orders.load_event >= 0 and state.load_event == orders.load_event:
                meta = state.transfer_meta
                loads.append(self._copies(self._next(), id, meta.cpu_block_ids, meta.gpu_block_ids))
        return loads, stores, flushed

    def _next(self) -> int:
        self._number += 1
        return self._number - 1

    def _copies(self, number: int, id: str, tier: list[int], gpu: list[int]) -> structs.Transfer:
        return structs.Transfer(number, id, list(tier), list(gpu), [], [], False)

    def _completed(self, jobs: dict[int, int]) -> Any:
        return self._objects.stored(
            {self._events_of[job]: each for job, each in jobs.items() if job in self._events_of}
        )

    def _tier_state(self) -> tuple[structs.PoolState, dict[str, structs.Held], dict[str, list[int]]]:
        tier = self._tier
        pool = tier.cpu_block_pool
        chunks = [
            structs.ChunkState(hash_name_of(key), block.block_id, block.ref_cnt, None)
            for block in pool.blocks
            if block.block_hash is not None
            for key in (block.block_hash, *pool.cached_block_hashes_by_block.get(block.block_id, ()))
        ]
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        requests = {
            id: self._held(
                state.request,
                [list(row) for row in state.block_ids],
                list(state.num_stored_blocks),
                [self._jobs_of[event] for event in state.store_events],
            )
            for id, state in tier._reqs_to_store.items()
        }
        fences = {str(block): list[int]() for block in sorted(tier._in_flight_store_gpu_blocks)}
        stores = {**tier._store_event_to_blocks, **tier._abandoned_store_event_to_blocks} if tier._lazy_mode else {}
        copied = {block: self._jobs_of[event] for event, copies in stores.items() for block in copies.gpu_block_ids}
        fences |= {str(block): [job] for block, job in sorted(copied.items())}
        return structs.PoolState(chunks, 0, free, 0, [], 0.0, []), requests, fences


def name_of(key: bytes) -> structs.Key:
    """A key of vLLM's as logs of a pool name it."""
    return key[:-4].decode(), int.from_bytes(key[-4:], "big")


def hash_name_of(key: bytes) -> structs.Key:
    """A key of vLLM's as logs of a scheduler name it, by its prefix's hash."""
    return key[: vllm_objects.KEY_BYTES].hex(), int.from_bytes(key[-4:], "big")


def pool_event(event: Any, named: Any) -> structs.PoolEvent:
    """An event of the manager; keys that became ready, or whose store failed, stand in no order."""
    keys = [named(key) for key in event.keys]
    evicted = event.removed and not event.metadata_only
    return structs.PoolEvent(keys if evicted else sorted(keys), event.removed, event.metadata_only)


def pool_state(manager: Any, named: Any) -> structs.PoolState:
    """State of vLLM's manager."""
    policy = manager._policy
    lru = hasattr(policy, "chunks")
    if lru:
        chunks, ranks, gone = policy.chunks, policy._ranks, []
        order = sorted(chunks, key=lambda key: (ranks[key], key))
    else:
        chunks, ranks = {**policy.t1, **policy.t2}, {}
        order, gone = list(chunks), [[named(key) for key in ghosts] for ghosts in (policy.b1, policy.b2)]
    return structs.PoolState(
        [structs.ChunkState(named(key), chunks[key].chunk_id, chunks[key].ref_cnt, ranks.get(key)) for key in order],
        manager._num_allocated_chunks,
        list(manager._free_list),
        0 if lru else len(policy.t2),
        gone,
        0.0 if lru else float(policy.target_t1_size),
        [(named(key), count) for key, count in (manager.counts or {}).items()],
    )

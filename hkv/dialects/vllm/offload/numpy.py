"""The reference as an engine: `reference.dialects.vllm.offload` behind the operations of the tier's logs."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

from hkv.contract.explanation import MissingEntry, Resumption
from hkv.dialects.vllm.engines.numpy import key_text
from hkv.dialects.vllm.offload import log as structs
from hkv.dialects.vllm.offload.config import SIMPLE
from hkv.dialects.vllm.offload.lifecycle import PoolLifecycle, SchedulerLifecycle, keys_of
from hkv.dialects.vllm.offload.workers import Workers
from hkv.version import check_reference

if TYPE_CHECKING:
    from hkv.dialects.vllm.offload.connector import Connector, Offloading
    from hkv.dialects.vllm.offload.plain import ChunkPool, Context, Name
    from hkv.dialects.vllm.offload.scheduler import Scheduler


def engine(header: structs.Header) -> NumpyPool | NumpyScheduler | NumpySimple:
    """The reference of what a header describes: a pool by itself, or a scheduler.

    Raises:
      ConfigError: a tier that vLLM does not have.
    """
    check_reference()
    if header.dialect == structs.CHUNKS:
        return NumpyPool(header)
    return (NumpySimple if header.connector == SIMPLE else NumpyScheduler)(header)


class NumpyPool:
    """The reference of a pool by itself.

    Attributes:
      pool: the reference's object, for inspection.
    """

    pool: ChunkPool

    def __init__(self, header: structs.Header) -> None:
        from hkv.dialects.vllm.offload.plain import ChunkPool

        config = structs.to_config(header)
        self.pool = ChunkPool(config.num_chunks, config.policy, config.threshold, config.tracked)
        self._lifecycle = PoolLifecycle()
        self._contexts: dict[str, Context] = {}

    def perform(self, operation: structs.Operation) -> Any:
        """Performs one operation and returns its answer.

        Raises:
          OperationError: it cannot come now; nothing changed.
        """
        jobs = dict(self._lifecycle.jobs)
        self._lifecycle.follow(operation)
        answer = self._answer(operation, jobs)
        self._lifecycle.answered(operation, answer)
        return answer

    def _answer(self, operation: structs.Operation, jobs: dict[int, tuple[bool, list[structs.Key]]]) -> Any:
        from hkv.dialects.vllm.offload.plain import Context

        pool = self.pool
        match operation:
            case structs.BeginOp():
                context = self._contexts[operation.id] = Context()
                pool.begin(context)
            case structs.StoreOp():
                stored = pool.store(keys_of(operation.keys), self._context(operation))
                return structs.Stored(None, [], []) if stored is None else structs.Stored(*stored)
            case structs.LoadOp():
                return structs.Loaded(pool.load(keys_of(operation.keys), self._context(operation)))
            case structs.DoneOp():
                writes, keys = jobs[operation.job]
                if writes:
                    pool.complete_store(keys, ok=not operation.failed)
                else:
                    pool.complete_load(keys)
            case structs.EndOp():
                pool.end(self._contexts.pop(operation.id))
            case structs.ClearOp():
                pool.clear()
            case structs.EventsOp():
                return [structs.PoolEvent(*event) for event in pool.take_events()]
            case _:
                return structs.State(pool.state(lambda key: key))
        return None

    def _context(self, operation: structs.StoreOp | structs.LoadOp) -> Context:
        context = self._contexts[operation.id]
        context.positions.update({(name, group): end for name, group, end in operation.keys})
        return context


class _NumpyScheduler(abc.ABC):
    """The reference of a scheduler with a tier.

    Attributes:
      scheduler: the reference's object, for inspection.
    """

    scheduler: Scheduler

    def __init__(self, header: structs.Header) -> None:
        config: Any = structs.to_config(header)
        if config.connector == SIMPLE:
            from hkv.dialects.vllm.offload.simple import SimpleScheduler

            self.scheduler = SimpleScheduler(config)
        else:
            from hkv.dialects.vllm.offload.scheduler import OffloadScheduler

            self.scheduler = OffloadScheduler(config)
        self._lifecycle = SchedulerLifecycle(header)
        self._workers = Workers(header.workers)

    def perform(self, operation: structs.Operation) -> Any:
        """Performs one operation and returns its answer.

        Raises:
          OperationError: it cannot come now; nothing changed.
        """
        self._lifecycle.follow(operation)
        answer = self._answer(operation)
        self._lifecycle.answered(operation, answer)
        return answer

    def _answer(self, operation: structs.Operation) -> Any:
        scheduler = self.scheduler
        match operation:
            case structs.RequestOp(id=id, tokens=tokens, output=output):
                scheduler.request(id, tokens, output, operation.load_limit, operation.store_limit)
            case structs.StepOp():
                return self._step(operation)
            case structs.AbortOp():
                scheduler.abort(operation.id)
            case structs.ResetOp():
                return structs.Reset(scheduler.reset(operation.preempt, operation.tier))
            case _:
                return self._state()
        return None

    def _step(self, operation: structs.StepOp) -> structs.Stepped:
        scheduled = self.scheduler.schedule()
        orders = scheduled.orders
        reported = self._workers.report(
            [(each.job, each.id, each.within) for each in orders.loads],
            [each.job for each in orders.stores],
            orders.flushed,
            operation.reports,
            operation.at_once,
        )
        finished = self.scheduler.output(scheduled, *reported)
        return structs.Stepped(
            [structs.Match(*match) for match in scheduled.matches],
            scheduled.tokens,
            scheduled.preempted,
            [structs.Transfer(**vars(each)) for each in orders.loads],
            [structs.Transfer(**vars(each)) for each in orders.stores],
            sorted(orders.flushed),
            finished,
            *self._told(),
        )

    @abc.abstractmethod
    def _told(self) -> tuple[list[structs.PoolEvent], int]:
        """Events of the tier's pool, and stores so far that found no room."""

    @abc.abstractmethod
    def _tier(self) -> tuple[structs.PoolState, dict[str, structs.Held], dict[str, list[int]]]:
        """State of the tier's pool, its requests, and blocks of the GPU that wait for jobs."""

    def _state(self) -> structs.State:
        scheduler = self.scheduler
        running, waiting, holding = scheduler.queues()
        pool, requests, fences = self._tier()
        free = scheduler.free()
        return structs.State(pool, structs.SchedulerState(running, waiting, holding, free, requests, fences))

    def _held(self, state: Offloading, blocks: list[list[int]]) -> structs.Held:
        rows = self.scheduler.rows(state.request.id)
        return structs.Held(state.request.num_computed, rows, blocks, list(state.cursors), sorted(state.jobs))


class NumpyScheduler(_NumpyScheduler):
    """The reference of `OffloadingConnector`."""

    @property
    def _connector(self) -> Connector:
        from hkv.dialects.vllm.offload.scheduler import OffloadScheduler

        assert isinstance(self.scheduler, OffloadScheduler)
        return self.scheduler.connector

    def _told(self) -> tuple[list[structs.PoolEvent], int]:
        events = self._connector.pool.take_events()
        named = [structs.PoolEvent([_named(key) for key in event.keys], *event[1:]) for event in events]
        return named, self._connector.refused

    def _tier(self) -> tuple[structs.PoolState, dict[str, structs.Held], dict[str, list[int]]]:
        connector = self._connector
        per_chunk = connector.config.blocks_per_chunk
        requests = {
            id: self._held(
                state,
                [row[cursor * per_chunk :] for row, cursor in zip(state.blocks, state.cursors, strict=True)],
            )
            for id, state in connector.requests.items()
        }
        fences = {str(block): sorted(jobs) for block, jobs in sorted(connector.fences.items())}
        return connector.pool.state(_named), requests, fences

    def resumptions(self, id: str) -> list[Resumption]:
        """Lengths at which each group could resume a request from the tier alone, were nothing of it on the GPU.

        Raises:
          LookupError: the tier knows no such request.
        """
        connector = self._connector
        state, config, found = connector.requests[id], connector.config, list[Resumption]()
        unit, keys = config.cache.hash_block_size, state.request.keys
        for group, size in enumerate(config.chunk_tokens):
            there = [connector.pool.lookup((key, group)) is not None for key in keys[size // unit - 1 :: size // unit]]

            def gone(end: int, group: int = group, there: list[bool] = there) -> list[int]:
                first = max(0, end - (config.window(group) or end))
                return [place for place in range(first, end) if not there[place]]

            best = max(end for end in range(len(there) + 1) if not gone(end))
            kind, block = config.cache.topology.specs[group].kind, config.cache.block_size(group)
            lacks = [
                MissingEntry(at * size, (at + 1) * size - 1, "not in the tier")
                for at in gone(min(best + 1, len(there)))
            ]
            beyond = (best + 1) * size if best < len(there) else None
            found.append(Resumption(group, kind, block, best * size, beyond, tuple(lacks)))
        return found


class NumpySimple(_NumpyScheduler):
    """The reference of `SimpleCPUOffloadConnector`."""

    def _told(self) -> tuple[list[structs.PoolEvent], int]:
        return [], 0

    def _tier(self) -> tuple[structs.PoolState, dict[str, structs.Held], dict[str, list[int]]]:
        from hkv.dialects.vllm.offload.simple import SimpleScheduler

        scheduler = self.scheduler
        assert isinstance(scheduler, SimpleScheduler)
        chunks = [
            structs.ChunkState((key_text(chain), group), block, refs, None)
            for chain, group, block, refs in scheduler.tier_blocks()
        ]
        requests = {
            id: structs.Held(served.num_computed, scheduler.rows(id), blocks, cursors, jobs)
            for id, (served, blocks, cursors, jobs) in scheduler.saved().items()
        }
        fences = {str(block): jobs for block, jobs in scheduler.reading().items()}
        return structs.PoolState(chunks, 0, scheduler.tier_free(), 0, [], 0.0, []), requests, fences


def _named(key: Name) -> structs.Key:
    return key_text(key[0]), key[1]

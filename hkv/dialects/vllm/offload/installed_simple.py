"""Drives an installed vLLM's `SimpleCPUOffloadConnector`, whose tier is a pool of blocks with the GPU's own rules.

Its jobs have no numbers: all stores of a step are one event, all loads another, and each load ends by its request's
name. They get numbers here, the store of a step before its loads.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

from hkv.dialects.vllm.offload import log as structs
from hkv.dialects.vllm.offload.installed import InstalledScheduler


class InstalledSimple(InstalledScheduler):
    """vLLM 0.33.0's `Scheduler` with its `SimpleCPUOffloadConnector`."""

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
            structs.ChunkState(self._objects.name_of(key), block.block_id, block.ref_cnt, None)
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
        return structs.PoolState(chunks, 0, free, 0, [], 0.0, []), requests, fences

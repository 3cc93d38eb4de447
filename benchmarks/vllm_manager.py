"""Runs vLLM's own block manager through prompts or a replay's schedule, under an interpreter that has vLLM.

`benchmarks/replay.py` starts it as a process of its own, sends one JSON object a line and reads one back for each run.
Keys are given: requests come with their block hashes. What is timed are the calls of vLLM's manager alone.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from typing import Any

import numpy as np

from hkv.dialects.vllm.engines import vllm_objects
from hkv.dialects.vllm.engines.installed import InstalledVllmEngine
from hkv.dialects.vllm.log.structs import AllocateOp, Allocation, Hit
from hkv.dialects.vllm.schedule.run import cache_config, header
from hkv.dialects.vllm.schedule.schedule import Chunking, Replay
from hkv.replay.schedule import Arrival, Recorder, Schedule
from hkv.spec import spec_from_text


class TimedManager:
    """A `KeyedEngine` for the schedule: calls vLLM's manager and adds up the time spent inside it.

    Args:
      config: the cache.
      record: whether to keep the ids that are found and handed out, at the cost of memory; never inside the timing.
    """

    def __init__(self, config: Any, record: bool) -> None:
        engine = InstalledVllmEngine(header(config))
        self._config = config
        self._manager = engine._manager
        self._manager.block_pool.enable_kv_cache_events = False
        del self._manager.block_pool.__dict__["_maybe_evict_cached_block"]
        self._record = record
        self._requests: dict[str, Any] = {}
        self._running = 0
        self._found: Any = None
        self.seconds = 0.0
        self.ids: list[int] = []

    def request_keyed(self, id: str, num_tokens: int, keys: Any) -> None:
        """A request arrives; its hashes are made here, outside the timing."""
        hasher = vllm_objects.keyed_hasher(keys, self._config)
        self._requests[id] = vllm_objects.request(id, [0] * num_tokens, None, hasher)

    def step(self) -> None:
        """A new scheduling step begins."""
        start = time.perf_counter()
        self._manager.new_step_starts()
        self.seconds += time.perf_counter() - start

    def lookup(self, id: str) -> Hit:
        """The longest hit; its rows are not read."""
        request = self._requests[id]
        start = time.perf_counter()
        blocks, hit, boundary = self._manager.get_computed_blocks(request)
        self.seconds += time.perf_counter() - start
        self._found = blocks if hit else None
        if self._record and hit:
            for row in blocks.blocks:
                ids = [block.block_id for block in row]
                self.ids.extend(ids[next((i for i, block in enumerate(ids) if block), len(ids)) :])
        return Hit(hit, [], boundary)

    def allocate(self, operation: AllocateOp) -> Allocation:
        """As vLLM's scheduler calls it."""
        request, found = self._requests[operation.id], self._found
        self._found = None
        if operation.shared_prefix is not None:
            request.shared_prefix_boundary = operation.shared_prefix
        waiting = operation.must_fit
        start = time.perf_counter()
        blocks = self._manager.allocate_slots(
            request,
            operation.new,
            num_new_computed_tokens=operation.hit,
            new_computed_blocks=found,
            num_lookahead_tokens=operation.lookahead,
            full_sequence_must_fit=waiting,
            has_scheduled_reqs=self._running > 0,
        )
        self.seconds += time.perf_counter() - start
        if blocks is None:
            return Allocation(None)
        if waiting:
            vllm_objects.set_running(request)
            self._running += 1
        if self._record:
            for row in blocks.blocks:
                self.ids.extend(block.block_id for block in row)
        return Allocation([])

    def advance(self, id: str, tokens: int) -> None:
        """More tokens are computed."""
        self._requests[id].num_computed_tokens += tokens

    def extend(self, id: str, tokens: int) -> None:
        """Tokens are generated; their hashes are made outside the timing."""
        self._requests[id].append_output_token_ids([0] * tokens)

    def free(self, id: str) -> None:
        """A request gives its blocks back."""
        request = self._requests[id]
        start = time.perf_counter()
        self._manager.free(request)
        self.seconds += time.perf_counter() - start
        self._running -= 1
        request.num_computed_tokens = 0
        vllm_objects.set_preempted(request)

    def drop(self, id: str) -> None:
        """A request is forgotten."""
        del self._requests[id]

    def num_free(self) -> int:
        """Blocks in the free queue."""
        return self._manager.block_pool.get_num_free_blocks()

    def free_queue(self) -> list[int]:
        """Their ids, the next to be handed out first."""
        return [block.block_id for block in self._manager.block_pool.free_block_queue.get_all_free_blocks()]


def run_prompts(engine: TimedManager, requests: list[list[int]], keys: np.ndarray, hash_block: int) -> dict[str, Any]:
    """One prompt at a time: look it up, allocate the rest, which registers it, give it back."""
    hits = []
    for index, (_, prompt, _, start) in enumerate(requests):
        id = str(index)
        engine.request_keyed(id, prompt, keys[start : start + prompt // hash_block].tolist())
        found = engine.lookup(id)
        operation = AllocateOp(
            id=id, new=prompt - found.hit, hit=found.hit, lookahead=0, external=0, delay=False, must_fit=False,
            reserved=0, in_flight=0, shared_prefix=None,
        )  # fmt: skip
        if engine.allocate(operation).blocks is None:
            raise SystemExit(f"request {index} does not fit the pool")
        engine._running += 1
        engine.free(id)
        engine.drop(id)
        hits.append(found.hit)
    return {"hits": hits}


def run_schedule(engine: TimedManager, requests: list[list[int]], keys: np.ndarray, job: dict[str, Any]) -> Any:
    """The plain schedule over the manager."""
    schedule, config = Schedule(**job["schedule"]), engine._config
    arrivals = [
        Arrival(i, step, prompt, output, Keys(keys, start, start + (prompt + output) // config.hash_block_size))
        for i, (step, prompt, output, start) in enumerate(requests)
    ]
    recorder = Recorder(config.num_blocks, None, lambda: None)
    steps = Replay(engine, schedule, Chunking.of(config, schedule.step_tokens), arrivals, recorder).run()  # type: ignore[arg-type]
    records = [recorder.requests[index] for index in range(len(arrivals))]
    return {
        "hits": [record.hit for record in records],
        "ended": [record.ended for record in records],
        "preemptions": sum(record.preemptions for record in records),
        "steps": steps,
    }


class Keys:
    """Makes a request's keys when called."""

    def __init__(self, keys: np.ndarray, start: int, end: int) -> None:
        self._keys, self._start, self._end = keys, start, end

    def __call__(self) -> list[int]:
        return self._keys[self._start : self._end].tolist()


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Performs one job. Its arrays come in a file, its ids leave in another."""
    arrays = np.load(job["arrays"])
    requests, keys = arrays["requests"].tolist(), arrays["keys"]
    specs = [spec_from_text(part) for part in job["groups"].split(",")]
    config = cache_config(specs, job["num_blocks"], Schedule(**job["schedule"]))
    engine = TimedManager(config, record=bool(job["ids"]))
    gc.collect()
    gc.freeze()
    if job["mode"] == "schedule":
        result = run_schedule(engine, requests, keys, job)
    else:
        result = run_prompts(engine, requests, keys, config.hash_block_size)
    if job["ids"]:
        np.savez(job["ids"], ids=np.asarray(engine.ids, np.int32), queue=np.asarray(engine.free_queue(), np.int32))
    return {**result, "seconds": engine.seconds}


def main() -> None:
    """Answers jobs until its input ends."""
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # vLLM leaves threads and bindings that complain on the way out

"""HKV's side of `benchmarks/replay.py`: prompts one at a time, or a whole schedule, compiled."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np

from hkv.dialects.vllm import machine as cache
from hkv.dialects.vllm.rules.operations import Argument, Code, Column
from hkv.dialects.vllm.schedule import compiled
from hkv.machine.operations import WIDTH, Operations
from hkv.replay import dispatches
from hkv.replay.schedule_state import RequestResult
from hkv.state.state import Counter

IDS = 1 << 23
"""Room for the block ids of a dispatch of a schedule."""

PROMPT = (Code.REQUEST, Code.LOOKUP, Code.ALLOCATE, Code.FREE, Code.DROP)
"""Operations on a prompt."""


def prepare(case: Any) -> dispatches.Incoming:
    """The requests as arrays: keys are made here."""
    return dispatches.incoming(case.arrivals, case.schedule.max_model_len)


def run(case: Any, prepared: dispatches.Incoming, ids: bool) -> dict[str, Any]:
    """One run from an empty cache: what was decided, and the seconds of the dispatches; the first compiles."""
    if case.mode == "schedule":
        return _schedule(case, prepared, ids)
    return prompts(case.config, prepared, 2 * case.block_operations if ids else 0)


def _schedule(case: Any, prepared: dispatches.Incoming, ids: bool) -> dict[str, Any]:
    config, schedule = case.config, case.schedule
    sizes = compiled.sizes_of(config, schedule, prepared)
    room = IDS if ids else 0
    replay = compiled.CompiledReplay(config, schedule, prepared, sizes=sizes, diagnose=False, ids=room)
    jax.block_until_ready(replay.resident)
    start = time.perf_counter()
    steps = replay.run()
    seconds = time.perf_counter() - start
    results = replay.request_results
    return {
        "seconds": seconds,
        "hits": results[:, RequestResult.HIT],
        "ended": results[:, RequestResult.ENDED],
        "preemptions": int(results[:, RequestResult.PREEMPTIONS].sum()),
        "steps": steps,
        "evictions": replay.evictions,
        "ids": np.concatenate(replay.ids) if ids else None,
        "queue": replay.free_queue(),
    }


def prompt_operations(prepared: dispatches.Incoming, hash_block: int) -> Operations:
    """REQUEST, LOOKUP, ALLOCATE of all that is left, FREE and DROP for each prompt, all in slot 0."""
    count = prepared.count
    table = np.zeros((len(PROMPT) * count + 1, WIDTH), np.int32)
    for place, code in enumerate(PROMPT):
        table[place : len(PROMPT) * count : len(PROMPT), Argument.CODE] = code
    first = table[0 : len(PROMPT) * count : len(PROMPT)]
    first[:, Argument.TOKENS] = prepared.requests[:-1, 1]
    first[:, Argument.KEYS] = prepared.requests[:-1, 1] // hash_block
    first[:, Argument.KEY_START] = prepared.requests[:-1, 3]
    third = table[2 : len(PROMPT) * count : len(PROMPT)]
    for argument, value in (
        (Argument.NEW, -1),
        (Argument.HIT, -1),
        (Argument.SHARED_PREFIX, -1),
        (Argument.ADVANCE, 1),
    ):
        third[:, argument] = value
    return Operations(table, prepared.keys)  # type: ignore[arg-type]


def prompts(config: Any, prepared: dispatches.Incoming, room: int) -> dict[str, Any]:
    """A run of prompts one at a time, as `run`; with room for so many block ids, 0 for none."""
    longest = int(prepared.requests[:-1, 1].max())
    buckets = cache.buckets_for(config, requests=8, keys=prepared.num_keys, tokens=longest)
    operations = jax.device_put(prompt_operations(prepared, config.hash_block_size))
    parameters, state = jax.device_put(cache.init(config, buckets))
    jax.block_until_ready((operations, parameters, state))
    start = time.perf_counter()
    state, results = jax.block_until_ready(cache.run(parameters, state, operations, ids=room, only=PROMPT))
    seconds = time.perf_counter() - start
    table = np.asarray(results.table)[:-1]
    cache.check(results)
    counters = np.asarray(state.counters)
    return {
        "seconds": seconds,
        "hits": table[1 :: len(PROMPT), Column.VALUE],
        "preemptions": 0,
        "evictions": int(counters[Counter.EVICTIONS]),
        "ids": np.asarray(results.ids)[: int(results.counts[0])] if room else None,
        "queue": compiled.queue_of(jax.device_get(state)),
    }

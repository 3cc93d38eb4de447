"""Cost of a block as a function of the pool's size and of requests' length, next to a random gather as large; of a
chunk as a function of the second tier's size."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hkv.dialects.vllm.offload.config import BUGS, OffloadConfig
from hkv.dialects.vllm.offload.plain import ChunkPool, Context
from hkv.dialects.vllm.schedule import compiled, tier_dispatches
from hkv.dialects.vllm.schedule.run import cache_config
from hkv.dialects.vllm.schedule.tier import Tier
from hkv.errors import MissingExtraError
from hkv.replay import dispatches
from hkv.replay.schedule import Schedule
from hkv.spec import spec_from_text

GROUPS = "full:16,swa:16:1024,swa:16:128"
POOLS = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
"""Blocks in the pool; prompts of `LENGTH` tokens."""

LENGTH = 4_096
LENGTHS = (256, 1_024, 4_096, 16_384, 65_536)
"""Tokens of a prompt; pools of `POOL` blocks."""

POOL = 100_000
BLOCKS = 300_000
"""Least block operations of a measurement, about; three times the pool where that is more."""


def measure(repeats: int, plot_path: str | None) -> dict[str, Any]:
    """Nanoseconds per block operation, and per element of a random gather, by pool size and by prompt length."""
    result: dict[str, Any] = {"mode": "scaling", "groups": GROUPS}
    result["pool"] = [_point(pool, LENGTH if pool > 1_000 else 2_048, repeats) for pool in POOLS]
    result["length"] = [_point(POOL, length, repeats) for length in LENGTHS]
    for points in (result["pool"], result["length"]):
        for point in points:
            told = "{num_blocks:>9,} blocks {tokens:>7,} tokens {hkv_ns:6.1f} ns, gather {gather_ns:5.1f} ns"
            print(told.format(**point))
    if plot_path:
        _draw(result, plot_path)
    return result


TIERS = (10_000, 100_000, 1_000_000)
"""Chunks of a second tier; `--num-blocks` adds one more size."""

COMPILED_TIERS = (*TIERS, 10_000_000)
"""Those of a compiled replay."""

PROMPT, SHARED = 256, 64
"""Chunks of a prompt, and of its beginning, which one of 16 others had too."""


def measure_tier(repeats: int, more: int | None) -> dict[str, Any]:
    """Processor time of a second tier's operation in nanoseconds per chunk, by the tier's size, once it is full.

    A request loads what it shares, stores the rest, which evicts as many chunks, and ends.
    """
    result: dict[str, Any] = {"mode": "tier", "points": []}
    for policy in ("lru", "arc"):
        for size in (*TIERS, *([more] if more else ())):
            pool = ChunkPool(size, policy)
            number = 0
            while pool.counts.evicted == 0:
                number = _serve(pool, number)
            seconds = []
            for _ in range(repeats):
                began, last = time.process_time(), number + 200
                while number < last:
                    number = _serve(pool, number)
                seconds.append((time.process_time() - began) / (200 * PROMPT))
            found = {"policy": policy, "chunks": size, "hkv_ns": statistics.median(seconds) * 1e9}
            print("{policy} {chunks:>10,} chunks {hkv_ns:8.0f} ns".format(**found))
            result["points"].append(found)
    return result


def _serve(pool: ChunkPool, number: int) -> int:
    """One request: what it shares with every sixteenth is loaded where it is there."""
    keys = [(number % 16 * PROMPT + at if at < SHARED else (number + 16) * PROMPT + at, 0) for at in range(PROMPT)]
    request = Context(dict(zip(keys, range(1, PROMPT + 1), strict=True)))
    ready = [key for key in keys[:SHARED] if pool.lookup(key)]
    pool.load(ready, request)
    pool.complete_load(ready)
    stored = pool.store(keys, request)
    assert stored is not None
    pool.complete_store(stored.keys)
    pool.end(request)
    return number + 1


def measure_offload(case: Any, sizes: Sequence[int], repeats: int) -> dict[str, Any]:
    """Processor time of a replay without a second tier, and of the same with tiers of several sizes, in turn.

    One program serves all sizes: each has room for the largest. The ratio is that of the least times.
    """
    from benchmarks import compiled_runs

    prepared, config, schedule = compiled_runs.prepare(case), case.config, case.schedule
    config = dataclasses.replace(config, retention_interval=0)
    tiers = [_tier(config, schedule, chunks) for chunks in sizes]
    largest = tier_dispatches.sizes_of(config, schedule, prepared, 1)
    times: dict[int, list[float]] = {chunks: [] for chunks in (0, *sizes)}
    stored: dict[int, int] = {}
    for turn in range(repeats + 1):
        for chunks, tier in zip((0, *sizes), (None, *tiers), strict=True):
            if tier is None:
                fitting = compiled.sizes_of(config, schedule, prepared)
                running: Any = compiled.CompiledReplay(config, schedule, prepared, sizes=fitting, diagnose=False)
            else:
                more = {"jobs": tier_dispatches.JOBS, "room": max(sizes), "diagnose": False}
                running = tier_dispatches.TierReplay(tier, schedule, prepared, sizes=largest, **more)
            jax.block_until_ready(running.resident)
            began = time.process_time()
            running.run()
            if turn:
                times[chunks].append(time.process_time() - began)
            stored[chunks] = running.counts["stored"] if tier is not None else 0
    plain = min(times[0])
    points = [
        {"chunks": chunks, "stored": stored[chunks], "seconds": min(times[chunks]), "ratio": min(times[chunks]) / plain}
        for chunks in sizes
    ]
    for point in points:
        point["chunk_ns"] = (point["seconds"] - plain) / max(point["stored"], 1) * 1e9
    told = "{chunks:>10,} chunks {stored:>10,} stored {seconds:6.2f} s, {ratio:4.2f} times, {chunk_ns:4.0f} ns a chunk"
    for point in points:
        print(told.format(**point))
    return {"mode": "offload", "groups": case.groups, "seconds": plain, "points": points}


def _tier(config: Any, schedule: Schedule, chunks: int) -> Tier:
    tier = OffloadConfig(
        cache=config,
        num_chunks=chunks,
        step_tokens=schedule.step_tokens,
        most_running=schedule.max_running,
        bugs=frozenset(BUGS),
    )
    return Tier(config=tier)


def _point(num_blocks: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Prompts without anything in common: every block in turn is taken, registered and given back."""
    from benchmarks import compiled_runs

    schedule = Schedule(max_model_len=max(tokens, 16))
    per_request = tokens // 16
    count = max(1, max(BLOCKS, 3 * num_blocks) // (3 * per_request))
    prepared = _incoming(count, tokens)
    config = cache_config([spec_from_text(part) for part in GROUPS.split(",")], num_blocks, schedule)
    operations = 3 * per_request * count
    times, gathers = [], []
    for turn in range(repeats + 1):
        seconds = compiled_runs.prompts(config, prepared, 0)["seconds"]
        gathered = _gather(num_blocks, prepared.num_keys)
        if turn:
            times.append(seconds / operations * 1e9)
            gathers.append(gathered)
    return {
        "num_blocks": num_blocks,
        "tokens": tokens,
        "block_operations": operations,
        "hkv_ns": min(times),
        "hkv_median_ns": statistics.median(times),
        "gather_ns": min(gathers),
    }


def _incoming(count: int, tokens: int) -> dispatches.Incoming:
    per_request = tokens // 16
    requests = np.zeros((count + 1, 4), np.int32)
    requests[:-1, 1] = tokens
    requests[:, 3] = np.arange(count + 1) * per_request
    ends = np.arange(count + 1, dtype=np.int64) * per_request
    return dispatches.Incoming(requests, np.arange(count * per_request, dtype=np.int32), ends, count * per_request)


@jax.jit
def _gathered(arrays: tuple[jax.Array, ...], places: jax.Array) -> jax.Array:
    """A sum over random places of arrays as large as the cache's, each place known when the one before is read."""

    def body(i: jax.Array, total: jax.Array) -> jax.Array:
        place = places[i] ^ (total & 1)
        return total + sum(array[place % array.shape[0]] for array in arrays)

    return jax.lax.fori_loop(0, places.shape[0], body, jnp.int32(0))


def _gather(num_blocks: int, num_keys: int) -> float:
    """Nanoseconds to read one random place in each of the arrays that an operation uses."""
    sizes = (4 * num_blocks, num_blocks, num_blocks, 4 * num_keys)
    arrays = jax.device_put(tuple(np.zeros(size, np.int32) for size in sizes))
    places = jax.device_put(np.random.default_rng(0).integers(0, 1 << 30, 100_000).astype(np.int32))
    jax.block_until_ready(_gathered(arrays, places))
    start = time.perf_counter()
    jax.block_until_ready(_gathered(arrays, places))
    return (time.perf_counter() - start) / len(places) * 1e9


def _draw(result: dict[str, Any], path: str) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise MissingExtraError("matplotlib", "plots", "to draw a plot") from None
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, name, column, label in (
        (axes[0], "pool", "num_blocks", f"blocks in the pool, prompts of {LENGTH:,} tokens"),
        (axes[1], "length", "tokens", f"tokens of a prompt, pool of {POOL:,} blocks"),
    ):
        points = result[name]
        axis.semilogx([p[column] for p in points], [p["hkv_ns"] for p in points], "o-", label="block operation")
        axis.semilogx([p[column] for p in points], [p["gather_ns"] for p in points], "s--", label="random gather")
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("nanoseconds")
    axes[0].set_ylim(bottom=0)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)


__all__ = ["measure"]

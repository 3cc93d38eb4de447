"""The compiled schedule with a second tier against the plain one: every record, figure, free block, order of eviction.

All examples of a policy share an executable, which takes long to compile; so do those with a store threshold, and
those with recurrent states, and those that offer a window's end again.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import pathlib
import random
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from hkv.dialects.vllm.offload.config import BUGS, OffloadConfig
from hkv.dialects.vllm.schedule import tier_dispatches
from hkv.dialects.vllm.schedule.run import cache_config
from hkv.dialects.vllm.schedule.tiered import Tier, TieredCache
from hkv.errors import ConfigError, UnsupportedConfigError
from hkv.machine import native_loops
from hkv.replay import dispatches
from hkv.replay.agreement import Difference
from hkv.replay.run import Outcome, Timing, default_engine, interned_arrivals, replay
from hkv.replay.schedule import Schedule
from hkv.replay.traces.interned import InternedTrace
from hkv.spec import LayerSpec, Mamba, spec_from_text
from tests.offload.test_replay import requests

CHAT = pathlib.Path(__file__).parents[3] / "examples" / "data" / "chat.jsonl"
GROUPS = (
    *("full:4", "full:4,swa:4:9", "full:4,swa:4:12,swa:4:32", "swa:4:12", "full:4,chunked:4:16"),
    *("swa:4:12,swa:4:30", "mla:4,swa:4:1"),
)
LARGER = ("full:4,mamba:8", "full:4,mamba:16", "full:8,mamba:16", "full:4,mamba:16,swa:4:9", "full:4,mamba:12,full:4")
"""Recurrent blocks larger than others: hits on the GPU end inside them."""
WINDOWS = (
    *("full:16,swa:4:9", "full:8,swa:4:1", "full:16,swa:8:9,swa:4:12", "full:16,swa:4:5,mamba:16"),
    "full:8,mamba:4,swa:4:3",
)
"""Windows in blocks smaller than others: under dense retention a request that ends offers their last segment again."""
STATES = (
    *("full:4,mamba:4", "full:4,swa:4:9,mamba:4", "mamba:4,mamba:4,mamba:4,full:4", "full:8,mamba:4", "mamba:4"),
    *("full:4,mamba:4,mamba:4", "swa:4:12,mamba:4", "chunked:4:16,full:4,mamba:4", *LARGER),
)


def example(
    seed: int, policy: str = "lru", counts: bool = False, groups: Sequence[str] = GROUPS
) -> tuple[TieredCache, Schedule]:
    """A small cache and tier, transfers of any speed, and a schedule; `counts`: with a store threshold."""
    draw = random.Random(seed)
    text = draw.choice(groups)
    schedule = Schedule(
        step_tokens=draw.choice((8, 32, 64)),
        decode_tokens=draw.choice((1, 2)),
        max_running=draw.choice((1, 2, 4, 8)),
        lookahead=draw.choice((0, 0, 3)),
        max_model_len=draw.choice((110, 256)),
        closed_loop=draw.choice((0, 0, 0, 3, 9)),
    )
    specs = [_with_more_states(spec_from_text(part), seed) for part in text.split(",")]
    grid = math.lcm(*(spec.block_size for spec in specs))
    sparse = "swa" in text or "mamba" in text
    retention = draw.choice((None, 0, 0, grid, 2 * grid)) if sparse else None
    # Requests whose loads go on hold blocks: in few of these pools they come to wait for each other for good.
    blocks = draw.choice((34, 40, 60, 130)) if schedule.max_running > 2 else draw.choice((34, 40, 60))
    config = cache_config(specs, blocks, schedule, retention_interval=retention)
    config = dataclasses.replace(config, offloads="mamba" in text)
    decode = draw.choice((False, False, True))
    if groups is WINDOWS:
        config, decode = dataclasses.replace(config, retention_interval=None), True
    tier = OffloadConfig(
        cache=config,
        num_chunks=draw.choice((2, 7, 20, 40, 100)),
        prompt_only=not decode,
        step_tokens=schedule.step_tokens,
        most_running=schedule.max_running,
        bugs=frozenset(BUGS) if draw.random() < 0.7 else frozenset(),
    )
    speed: dict[str, Any] = {}
    if draw.random() < 0.5:
        speed = {"chunk_bytes": 8, "step_bytes": draw.choice((3, 8, 40, 1 << 30)), "step_tokens": 16.0}
        speed["setup_bytes"] = draw.choice((0, 0, 5, 90))
    more: dict[str, Any] = {"threshold": draw.choice((2, 2, 3)), "tracked": draw.choice((5, 40, 64_000))}
    tier = dataclasses.replace(tier, policy=policy, **(more if counts else {}))
    cache = TieredCache(config, Tier(config=tier, **speed))
    cache.sampling = 3
    return cache, schedule


def _with_more_states(spec: LayerSpec, seed: int) -> LayerSpec:
    """Recurrent states with scratch for drafts, and with some left behind inside prefill chunks, of some seeds each."""
    if not isinstance(spec, Mamba):
        return spec
    return dataclasses.replace(
        spec, num_speculative_blocks=2 * (seed % 3 == 0), num_prefill_checkpoint_blocks=int(seed % 4 == 0)
    )


def checked(
    seed: int,
    engine: str = "jax",
    policy: str = "lru",
    counts: bool = False,
    groups: Sequence[str] = GROUPS,
    **speed: float,
) -> Outcome:
    cache, schedule = example(seed, policy, counts, groups)
    cache.tier = dataclasses.replace(cache.tier, **speed)
    checks, causes = engine == "jax", seed % 6 == 0  # which take another replay each
    trace = requests(seed, apart=seed % 4 == 1)
    return replay(trace, cache, schedule, Timing(step_ms=50), engine=engine, check=checks, causes=causes)


def decided(seeds: Iterable[int], policy: str, counts: bool, groups: Sequence[str]) -> collections.Counter[str]:
    """Figures of replays that both schedules decide alike, or that both end for good with the same words."""
    totals: collections.Counter[str] = collections.Counter()
    for seed in seeds:
        totals["cases"] += 1
        try:
            outcome = checked(seed, policy=policy, counts=counts, groups=groups)
        except Difference as difference:
            raise AssertionError(f"seed {seed}: {difference}") from difference
        except ConfigError as blocked:
            with pytest.raises(ConfigError, match=re.escape(str(blocked))):
                checked(seed, "numpy", policy, counts, groups)
            totals["blocked for good"] += 1
            continue
        totals.update({name: value for name, value in outcome.extra.items() if isinstance(value, int)})
        records = outcome.recorder.requests.values()
        totals["preempted"] += sum(record.preemptions for record in records)
        totals["refused for good"] += sum(record.outcome == "never fits" for record in records)
    return totals


@pytest.mark.parametrize(
    ("policy", "counts", "groups", "seeds"),
    [
        ("lru", False, GROUPS, 60),
        ("arc", False, GROUPS, 60),
        ("lru", True, GROUPS, 30),
        ("arc", True, GROUPS, 30),
        ("lru", False, STATES, 40),
        ("arc", True, STATES, 40),
        ("lru", False, WINDOWS, 30),
    ],
    ids=["lru", "arc", "lru-counted", "arc-counted", "states-lru", "states-arc-counted", "windows-lru"],
)
def test_decides_as_the_plain_schedule_does(policy: str, counts: bool, groups: Sequence[str], seeds: int) -> None:
    totals = decided(range(seeds), policy, counts, groups)
    wanted = ("tier_loads", "tier_waits", "tier_evicted", "tier_refused", "tier_flushed", "preempted")
    more = () if counts else ("tier_slower_loads",)
    more += ("blocked for good",) if policy == "lru" and groups is GROUPS and not counts else ()
    assert all(totals[name] for name in (*wanted, *more)), totals


def test_a_block_that_two_jobs_read_is_fenced_by_the_later_one() -> None:
    """A window's block is handed out and offered anew before its first request ends, whose job is flushed already."""
    assert checked(51, policy="arc", setup_bytes=0).extra["tier_flushed"] == 47


def test_a_block_that_two_jobs_of_one_step_read_is_fenced_by_the_one_that_goes_on() -> None:
    """A state stands in a block that an ended request gave back and stores in the same step: that job is flushed."""
    assert checked(135, policy="arc", groups=LARGER).extra["tier_flushed"] == 9


def test_a_wrong_figure_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails where the compiled tier has another size."""
    right = tier_dispatches.parameters

    def smaller(config: OffloadConfig, groups: int) -> Any:
        return right(dataclasses.replace(config, num_chunks=config.num_chunks - 1), groups)

    monkeypatch.setattr(tier_dispatches, "parameters", smaller)
    with pytest.raises(Difference):
        checked(6)


def test_few_slots_and_jobs_are_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay for which there was no room begins anew with twice as much."""
    begun, right = list[int](), TieredCache._begun

    def counted(cache: TieredCache, schedule: Schedule, prepared: Any, check: bool, factor: int) -> Any:
        begun.append(factor)
        running = right(cache, schedule, prepared, check, factor)
        if factor == 1:
            running._resident = dataclasses.replace(running._resident, machine=_without_slots(running))
        return running

    monkeypatch.setattr(TieredCache, "_begun", counted)
    assert checked(7).extra["tier_stored"] > 0
    assert begun == [1, 2]


def _without_slots(running: Any) -> Any:
    machine = np.array(running._resident.machine)
    machine[dispatches.Machine._fields.index("vacant")] = 0
    return machine


def test_the_chat_trace_is_replayed_alike() -> None:
    from hkv.replay.traces.reader import read_trace

    schedule = Schedule()
    specs = [spec_from_text(part) for part in ("full:16", "swa:16:1024")]
    config = cache_config(specs, 2500, schedule, retention_interval=0)
    tier = OffloadConfig(cache=config, num_chunks=6000, step_tokens=8192, most_running=256, bugs=frozenset(BUGS))
    cache = TieredCache(config, Tier(config=tier))
    trace = InternedTrace(read_trace(str(CHAT), None, None))
    outcome = replay(trace, cache, schedule, Timing(), engine="jax", check=True)
    assert outcome.extra["tier_loaded"] > 500


@pytest.mark.parametrize(
    ("policy", "counts", "groups"),
    [("lru", False, GROUPS), ("arc", True, GROUPS), ("lru", True, STATES), ("lru", False, WINDOWS)],
    ids=["lru", "arc-counted", "states-lru-counted", "windows-lru"],
)
def test_nothing_of_a_tiers_size_is_copied_in_a_step(policy: str, counts: bool, groups: Sequence[str]) -> None:
    cache, schedule = example(0, policy, counts, groups)
    coming = list(interned_arrivals(InternedTrace(requests(0)), cache.key_tokens, 256, Timing(), lists=False))
    running = cache._begun(schedule, dispatches.incoming(coming, schedule.max_model_len), False, 1)
    lowered = tier_dispatches.program(0).lower(running._parameters, running._inputs, running.resident)
    assert _large_copies(lowered.compile().as_text() or "", 512) == []


def _large_copies(text: str, size: int) -> list[str]:
    """Instructions of optimised HLO that copy at least so many integers."""
    found = []
    for line in text.splitlines():
        match = re.search(r"= \w+\[([\d,]*)\][^=]* copy(?:-start)?\(", line)
        if match and np.prod([int(n) for n in match[1].split(",") if n] or [1]) >= size:
            found.append(line.strip())
    return found


def test_what_the_compiled_tier_has_not_is_refused_by_name() -> None:
    schedule = Schedule(step_tokens=32, max_running=4, max_model_len=256)
    config = cache_config([spec_from_text("full:4"), spec_from_text("swa:4:12")], 60, schedule)
    cache = TieredCache(config, Tier(config=OffloadConfig(cache=config, num_chunks=20, blocks_per_chunk=2)))
    with pytest.raises(UnsupportedConfigError, match="offload"):
        cache.require_compiled()
    assert default_engine(cache)[0] == "numpy"


if __name__ == "__main__":
    native_loops.enable()
    for groups, policy, counts in itertools.product((GROUPS, STATES, WINDOWS), ("lru", "arc"), (False, True)):
        found = decided(range(*map(int, sys.argv[1:])), policy, counts, groups)
        told = ("cases", "blocked for good", "tier_stored", "tier_loads", "tier_flushed", "preempted")
        print(groups[0], policy, "counted" if counts else "", *(f"{found[name]:,} {name}" for name in told), flush=True)

"""Replays with a second tier: the reference's scheduler decides alike, request for request; figures; refusals."""

from __future__ import annotations

import dataclasses
import pathlib
import random

import pytest

from hkv.dialects.vllm.offload.config import BUGS, OffloadConfig
from hkv.dialects.vllm.offload.connector import Connector, Orders, Step
from hkv.dialects.vllm.offload.scheduler import VOCABULARY, OffloadScheduler, Scheduled
from hkv.dialects.vllm.schedule.run import cache_config, with_match_unit
from hkv.dialects.vllm.schedule.tier import Tier
from hkv.dialects.vllm.schedule.tiered import ENDLESS, MENDED, TieredCache
from hkv.replay.optimal import optimal_hits, reuse
from hkv.replay.plot import drawn_sweep
from hkv.replay.result import totals
from hkv.replay.run import Outcome, Timing, replay
from hkv.replay.schedule import Schedule
from hkv.replay.traces.interned import InternedTrace
from hkv.replay.traces.reader import TraceRequest
from hkv.spec import FullAttention, LayerSpec, Mamba, SlidingWindow
from reference.dialects.vllm.offload import serving

SCHEDULE = Schedule(step_tokens=32, decode_tokens=1, max_running=4, max_model_len=256)


def config(
    specs: list[LayerSpec],
    blocks: int,
    chunks: int,
    retention: int | None = None,
    unit: int | None = None,
    eagle: tuple[int, ...] | None = None,
    **options: object,
) -> OffloadConfig:
    cache = cache_config(specs, blocks, SCHEDULE, retention_interval=retention, eagle=eagle)
    if unit is not None:
        cache = with_match_unit(cache, unit)
    if any(spec.keeps_states for spec in specs):
        cache = dataclasses.replace(cache, offloads=True)
    more = {
        "bugs": frozenset(BUGS),
        "step_tokens": SCHEDULE.step_tokens,
        "most_running": SCHEDULE.max_running,
        "eagle": eagle or (),
        **options,
    }
    return OffloadConfig(cache=cache, num_chunks=chunks, **more)  # type: ignore[arg-type]


def requests(seed: int, count: int = 60, *, apart: bool = False) -> list[TraceRequest]:
    """Prompts that are one of few beginnings and go on as they like.

    Two come at a time; `apart`: one each some steps, so that some come just as nothing runs any more.
    """
    draw, times = random.Random(seed), random.Random(seed)
    arrives = 0
    beginnings = [[draw.randrange(5) for _ in range(draw.randrange(20, 90))] for _ in range(5)]
    found = []
    for index in range(count):
        tokens = draw.choice(beginnings)[: draw.randrange(8, 90)] + [
            draw.randrange(5) for _ in range(draw.randrange(20))
        ]
        output = draw.randrange(1, 9)
        told = [at % VOCABULARY for at in range(len(tokens), len(tokens) + output)]
        arrives += 50 * times.choice((0, 1, 2, 3, 4, 5, 6, 8)) if apart else 100 * (index % 2 == 0 and index > 0)
        arrival = {"line": index + 1, "timestamp": arrives}
        lengths = {"input_length": len(tokens), "output_length": output, "tokens_per_id": 1}
        found.append(TraceRequest(**arrival, **lengths, tokens=tokens, output_tokens=told))  # type: ignore[arg-type]
    return found


def by_the_scheduler(
    trace: list[TraceRequest], tier: OffloadConfig
) -> tuple[dict[int, tuple[int, int]], OffloadScheduler]:
    """Hit and loaded tokens of each request when it first got its blocks, of the reference's scheduler.

    A store is reported with the step after the one that ordered it, a load with its own.
    """
    driven, found = OffloadScheduler(tier), dict[int, tuple[int, int]]()
    coming, late, step = list(enumerate(trace)), list[int](), 0
    while coming or driven.requests or driven.connector.requests:
        while coming and coming[0][1].timestamp <= 50 * step:
            index, request = coming.pop(0)
            driven.request(str(index), request.tokens or [], request.output_length)
        held = {id for id, entry in driven.requests.items() if entry.live.request.running}
        scheduled = driven.schedule()
        orders = scheduled.orders
        loading = {transfer.id for transfer in orders.loads}
        for match in scheduled.matches:
            if driven.requests[match.id].live.request.running and match.id not in held and match.external is not None:
                there = driven.requests[match.id].num_computed - scheduled.tokens.get(match.id, 0)
                found.setdefault(int(match.id), (there, there - match.local if match.id in loading else 0))
        loads = [transfer.job for transfer in orders.loads]
        received = [transfer.id for transfer in orders.loads]
        stores = [transfer.job for transfer in orders.stores]
        now = [*late, *loads, *(job for job in stores if job in orders.flushed)]
        driven.output(scheduled, dict.fromkeys(sorted(now), tier.workers), received)
        late = [job for job in stores if job not in orders.flushed]
        step += 1
        assert step < 2_000
    return found, driven


def replayed(trace: list[TraceRequest], tier: OffloadConfig, decoded: int = 1, **speed: object) -> Outcome:
    cache = TieredCache(tier.cache, Tier(config=tier, **speed))  # type: ignore[arg-type]
    schedule = dataclasses.replace(SCHEDULE, lookahead=tier.drafts, decode_tokens=decoded)
    return replay(trace, cache, schedule, Timing(step_ms=50), causes=False)


CASES = {
    "full": ([FullAttention(block_size=4)], 40, 30, {}),
    "three groups": (
        [FullAttention(block_size=4), SlidingWindow(block_size=4, window=9), Mamba(block_size=4)],
        90,
        60,
        {},
    ),
    "retention": ([FullAttention(block_size=4), SlidingWindow(block_size=4, window=12)], 70, 40, {"retention": 0}),
    "arc": ([FullAttention(block_size=4), SlidingWindow(block_size=4, window=12)], 70, 30, {"policy": "arc"}),
    "threshold": ([FullAttention(block_size=4), Mamba(block_size=4)], 70, 40, {"threshold": 2, "workers": 2}),
    "decode": ([FullAttention(block_size=4)], 40, 60, {"prompt_only": False}),
    "tails": ([FullAttention(block_size=4), Mamba(block_size=4)], 70, 60, {"unit": 2}),
    "drafts": (
        [FullAttention(block_size=4), SlidingWindow(block_size=4, window=9)],
        90,
        60,
        {"drafts": 2, "eagle": ()},
    ),
    "prompts loaded but for a token": ([FullAttention(block_size=4)], 33, 90, {"drafts": 2, "eagle": ()}),
    "a draft's group": (
        [FullAttention(block_size=4), FullAttention(block_size=4), Mamba(block_size=4, num_speculative_blocks=2)],
        120,
        90,
        {"drafts": 2, "eagle": (1,), "prompt_only": False},
    ),
    "drafts and tails": (
        [FullAttention(block_size=4), Mamba(block_size=4, num_speculative_blocks=1)],
        90,
        90,
        {"drafts": 1, "eagle": (0,), "unit": 2},
    ),
}


def noted_steps(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Tokens and transfers of every step in which there were any, as a connector is told and orders them."""
    found, step, schedule = list[object](), Connector.step, OffloadScheduler.schedule

    def noted(self: Connector, given: Step) -> Orders:
        orders = step(self, given)
        if given.tokens or orders.loads or orders.stores:
            found.append((given.tokens, orders.loads, orders.stores))
        return orders

    def scheduled(self: OffloadScheduler) -> Scheduled:
        made = schedule(self)
        if made.tokens or made.orders.loads or made.orders.stores:
            found.append((made.tokens, made.orders.loads, made.orders.stores))
        return made

    monkeypatch.setattr(Connector, "step", noted)
    monkeypatch.setattr(OffloadScheduler, "schedule", scheduled)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_replay_decides_as_the_scheduler(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    specs, blocks, chunks, options = CASES[name]
    loaded, steps = 0, noted_steps(monkeypatch)
    for seed in range(4):
        tier, trace = config(list(specs), blocks, chunks, **options), requests(seed)
        decoded = 1 + seed % (1 + tier.drafts)
        monkeypatch.setattr(serving, "accepted", lambda _, checked, most=decoded - 1: min(most, checked))
        outcome = replayed(trace, tier, decoded)
        records, mine = outcome.recorder.requests, list(steps)
        steps.clear()
        wanted, _ = by_the_scheduler(trace, tier)
        assert mine == steps
        steps.clear()
        assert {index: (record.hit, record.loaded) for index, record in records.items()} == wanted
        loaded += sum(record.loaded for record in records.values())
    assert loaded > 100


@pytest.mark.parametrize("name", ["full", "three groups", "arc"])
def test_those_that_ended_are_told_of_in_the_step_for_which_a_request_has_come(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs, blocks, chunks, options = CASES[name]
    steps = noted_steps(monkeypatch)
    for seed in range(3):
        tier, trace = config(list(specs), blocks, chunks, **options), requests(seed, 30, apart=True)
        replayed(trace, tier)
        mine = list(steps)
        steps.clear()
        by_the_scheduler(trace, tier)
        assert mine == steps
        steps.clear()


def test_a_slow_link_delays_loads_and_changes_no_rule() -> None:
    """Each direction moves one transfer after the other, so that requests wait longer, and none is lost."""
    tier, trace = config([FullAttention(block_size=4)], 40, 60), requests(1)
    fast = replayed(trace, tier, chunk_bytes=8, step_bytes=1 << 20, step_tokens=16.0)
    slow = replayed(trace, tier, chunk_bytes=8, step_bytes=8, step_tokens=16.0)
    assert slow.extra["tier_load_steps"] > 2 * fast.extra["tier_load_steps"] > 0
    assert (fast.extra["tier_slower_loads"], slow.extra["tier_slower_loads"] > 5) == (0, True)
    assert fast.extra["tier_saved_steps"] > 0 > slow.extra["tier_saved_steps"]
    for outcome in (fast, slow):
        assert all(record.outcome == "finished" for record in outcome.recorder.requests.values())
        counts = {name: outcome.extra[f"tier_{name}"] for name in ("stored", "read", "loaded", "peak", "evicted")}
        assert 0 < counts["read"] <= min(counts["stored"], counts["loaded"])
        assert counts["peak"] == min(60, counts["stored"])


def test_a_load_takes_a_fixed_time_and_its_bytes() -> None:
    """Of Llama-3.1-8B 512 tokens are 64 MiB: 1.3 ms at 50 GB/s, besides those that each transfer takes."""
    tier, trace = config([FullAttention(block_size=4)], 40, 60), requests(1)
    second = 50_000_000_000
    speed = {"chunk_bytes": 2 << 20, "step_bytes": second}
    plain, fixed = (Tier(config=tier, setup_bytes=round(second * ms / 1000), **speed) for ms in (0, 10))
    assert [round(1000 * each.moved(512 // 16) / second, 1) for each in (plain, fixed)] == [1.3, 11.3]
    assert fixed.moved(64, transfers=2) == 2 * fixed.moved(32) > fixed.moved(64)
    quick, slow = (replayed(trace, tier, chunk_bytes=8, step_bytes=64, setup_bytes=each) for each in (0, 640))
    assert slow.extra["tier_load_steps"] > 5 * quick.extra["tier_load_steps"] > 0
    quick, slow = (
        replayed(trace, tier, chunk_bytes=8, step_bytes=64, setup_bytes=each, step_tokens=16.0) for each in (0, 640)
    )
    assert slow.extra["tier_slower_loads"] > quick.extra["tier_slower_loads"]
    assert slow.extra["tier_saved_steps"] < quick.extra["tier_saved_steps"] - 9 * slow.extra["tier_loads"]


def test_hits_of_both_tiers_and_causes_add_up_to_the_prompts() -> None:
    tier, trace = config([FullAttention(block_size=4), SlidingWindow(block_size=4, window=12)], 70, 30), requests(2)
    cache = TieredCache(tier.cache, Tier(config=tier))
    outcome = replay(trace, cache, SCHEDULE, Timing(step_ms=50))
    numbers = totals(outcome)
    assert numbers["hit_tokens"] + sum(outcome.missed.tokens.values()) == numbers["prompt_tokens"]
    assert 0 < numbers["loaded_tokens"] < numbers["hit_tokens"]
    assert numbers["tier_evicted"] > 0
    interned = InternedTrace(trace)
    bound = optimal_hits(reuse(interned, cache.hit_units, SCHEDULE.max_model_len), cache.pools)
    assert numbers["hit_tokens"] <= bound.sum() + cache.finer * len(trace)
    titles = [title for title, _, _ in cache.rows(numbers)]
    assert titles[:2] == ["hit on the GPU", "hit in the tier"]
    changed = cache.changed(1_000, 10, SCHEDULE)
    mended, endless = changed[MENDED], changed[ENDLESS]
    assert isinstance(mended, TieredCache)
    assert not mended.tier.config.bugs
    larger = totals(replay(trace, endless, SCHEDULE, Timing(step_ms=50), causes=False))
    assert (larger["tier_evicted"], larger["tier_refused"]) == (0, 0)
    assert larger["hit_tokens"] > numbers["hit_tokens"]


def test_a_window_of_one_token_more_than_chunks_is_hit_without_the_defect_alone() -> None:
    """Prompt after prompt from an empty GPU: the tier has what a boundary needs, and vLLM asks for one chunk more."""
    specs = [FullAttention(block_size=4), SlidingWindow(block_size=4, window=9)]
    tokens = [at % 5 for at in range(50)]
    arrival = {"input_length": 50, "output_length": 1, "tokens_per_id": 1, "tokens": tokens, "output_tokens": [0]}
    others = [{**arrival, "tokens": [number, *tokens[1:]]} for number in range(1, 5)]
    trace = [
        TraceRequest(line=at + 1, timestamp=at * 1_000, **each) for at, each in enumerate([arrival, *others, arrival])
    ]
    found = []
    for bugs in (frozenset(BUGS), frozenset[str]()):
        tier = config(specs, 32, 200, retention=0, bugs=bugs)
        outcome = replayed(trace, tier)
        found.append(outcome.recorder.requests[5].loaded)
        assert any("window-past-a-chunk-never-hits" in text for text in outcome.cache.warnings(50)) == bool(bugs)
    assert found[0] < found[1] == 48


def test_a_sweep_of_both_sizes_is_drawn_over_both(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        {"options": {"--num-blocks": size, "--offload": chunks}, "hit_rate": 0.5, "too_long": 0, "never_fit": 0}
        for size in ("60", "90")
        for chunks in ("20", "40")
    ]
    assert b"chunks in the second tier" in drawn_sweep(rows, str(tmp_path / "a.svg"), "title")
    assert b"chunks in the second tier" not in drawn_sweep(rows[:2], str(tmp_path / "a.svg"), "title")
    assert drawn_sweep(rows, str(tmp_path / "a.png"), "title", cost_ratio=2) != drawn_sweep(
        rows, str(tmp_path / "a.png"), "title"
    )

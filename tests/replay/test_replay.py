"""Whole replays through the reference engine, and, where vLLM is installed, in lock-step with its own manager."""

import dataclasses
import json
import pathlib
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.dialects.vllm.schedule.run import VllmReplayedCache, cache_config
from hkv.dialects.vllm.schedule.schedule import REASONS, Chunking
from hkv.errors import ConfigError
from hkv.replay.result import document, groups, totals
from hkv.replay.run import Timing, replay
from hkv.replay.schedule import FINISHED, Schedule
from hkv.replay.traces.workloads import DEFAULTS, Workload, generate, trace_lines
from hkv.spec import spec_from_text, spec_to_text

TIGHT = {
    "full:4": 60,
    "full:4,swa:4:32,swa:4:8": 130,
    "full:8,swa:4:20": 90,
    "full:4,chunked:4:32": 130,
    "mla:8,swa:4:16,mamba:16": 90,
    "full:4,mamba:16": 70,
    "swa:4:12,swa:4:30": 40,
    "full:12,swa:4:20": 90,
}
"""Groups, and a pool in which the workload below waits, evicts and preempts."""

SMALL = Workload(
    requests=60, rate=40.0, prefix_tokens=30, prompt_tokens=20, output_tokens=12, turns=4.0, pause=0.2, max_tokens=220
)
SCHEDULE = Schedule(step_tokens=64, decode_tokens=1, max_running=8, max_model_len=240)


def trace_of(tmp_path, kind="agentic", seed=0, format="tokens", workload=SMALL, tokens_per_id=16):
    path = tmp_path / f"{kind}-{seed}-{format}.jsonl"
    lines = trace_lines(generate(kind, workload, seed), format, tokens_per_id)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def cache(text, num_blocks, schedule=SCHEDULE, **options):
    specs = [spec_from_text(part) for part in text.split(",")]
    return VllmReplayedCache(cache_config(specs, num_blocks, schedule, **options))


def check_outcome(outcome, schedule):
    """Checks what must hold of every replay with an engine that tells why hits ended."""
    sums = totals(outcome)
    requests = outcome.recorder.requests.values()
    assert all(request.outcome for request in requests)
    assert sums["finished"] + sums["never_fit"] + sums["too_long"] == sums["requests"]
    admitted = [request for request in requests if request.admitted >= 0]
    for group in groups(outcome):
        assert sum(group["reasons"].values()) == len(admitted)
    for request in admitted:
        assert 0 <= request.hit < request.prompt
        assert request.hit % outcome.cache.key_tokens == 0
        assert request.arrived <= request.admitted <= request.ended or schedule.closed_loop
    steps = outcome.recorder.steps
    assert sum(steps.prompt_tokens) == sum(request.prompt for request in admitted)
    assert sums["prompt_tokens"] == sum(request.prompt for request in requests)
    assert sum(steps.hit_tokens) == sums["hit_tokens"]
    assert max(steps.in_use) <= outcome.cache.blocks
    assert max(steps.running) <= schedule.max_running
    assert steps.step == sorted(set(steps.step))


@pytest.mark.parametrize(("text", "num_blocks"), TIGHT.items())
def test_every_kind_replays_in_a_tight_pool(text, num_blocks, tmp_path):
    path = trace_of(tmp_path)
    config = cache(text, num_blocks)
    first = replay(path, config, SCHEDULE, Timing(), engine="numpy")
    check_outcome(first, SCHEDULE)
    sums = totals(first)
    assert sums["finished"] > 30
    assert sums["hit_tokens"] > 0
    assert sums["evictions"] > 0
    assert sums["put_off"] > 0
    second = replay(path, config, SCHEDULE, Timing(), engine="numpy")
    assert {**sums, "seconds": 0} == {**totals(second), "seconds": 0}
    assert first.recorder.requests == second.recorder.requests


def test_pressure_shows_up_as_preemption(tmp_path):
    outcome = replay(trace_of(tmp_path), cache("full:4,mamba:4", 90), SCHEDULE, Timing(), engine="numpy")
    check_outcome(outcome, SCHEDULE)
    sums = totals(outcome)
    assert sums["preemptions"] > 0
    assert 0 < sums["recovered_tokens"] < sums["recomputed_tokens"]


@given(
    text=st.sampled_from(sorted(TIGHT)),
    num_blocks=st.integers(30, 300),
    kind=st.sampled_from(sorted(DEFAULTS)),
    seed=st.integers(0, 50),
    step_tokens=st.integers(16, 128),
    decode_tokens=st.integers(1, 4),
    lookahead=st.integers(0, 3),
    closed_loop=st.sampled_from([0, 0, 5]),
    caching=st.booleans(),
    retention=st.sampled_from([None, 0]),
)
@settings(max_examples=40)
def test_what_must_hold_of_every_replay(tmp_path, text, num_blocks, kind, seed, caching, retention, **numbers):
    schedule = Schedule(max_running=6, max_model_len=240, **numbers)
    config = cache(text, num_blocks, schedule, caching=caching, retention_interval=retention)
    path = trace_of(tmp_path, kind, seed, workload=dataclasses.replace(SMALL, requests=20))
    outcome = replay(path, config, schedule, Timing(speed=Fraction(2)), engine="numpy")
    check_outcome(outcome, schedule)
    if not caching:
        assert totals(outcome)["hit_tokens"] == 0


def test_a_large_pool_finds_every_named_prefix(tmp_path):
    """With room for everything, one group and one request at a time, hits are the longest prefixes seen before."""
    path = trace_of(tmp_path)
    schedule = dataclasses.replace(SCHEDULE, closed_loop=1)
    outcome = replay(path, cache("full:4", 10_000, schedule), schedule, Timing(), engine="numpy")
    seen: set[tuple] = set()
    for index, line in enumerate(map(json.loads, pathlib.Path(path).read_text().splitlines())):
        tokens = line["tokens"]
        want = max((end for end in range(4, len(tokens), 4) if tuple(tokens[:end]) in seen), default=0)
        assert outcome.recorder.requests[index].hit == want
        whole = (tokens + line["output_tokens"])[: len(tokens) + len(line["output_tokens"]) - 1]
        seen.update(tuple(whole[:end]) for end in range(4, len(whole) + 1, 4))
    assert outcome.evictions == 0
    assert set(outcome.missed.reasons[0]) == {"nothing to find"}


def test_ids_find_less_than_tokens_but_not_nothing(tmp_path):
    hits = {}
    for format in ("tokens", "mooncake"):
        path = trace_of(tmp_path, "chat", 1, format)
        outcome = replay(path, cache("full:4", 5000), SCHEDULE, Timing(), engine="numpy", tokens_per_id=16)
        hits[format] = totals(outcome)["hit_tokens"]
    assert 0 < hits["mooncake"] < hits["tokens"]


def test_limit_and_speed(tmp_path):
    path = trace_of(tmp_path)
    config = cache("full:4", 5000)
    slow = replay(path, config, SCHEDULE, Timing(), engine="numpy", limit=20)
    slower = replay(path, config, SCHEDULE, Timing(speed=Fraction(1, 50)), engine="numpy", limit=20)
    assert len(slow.recorder.requests) == len(slower.recorder.requests) == 20
    assert slower.steps > slow.steps


def test_the_document_says_everything(tmp_path):
    outcome = replay(trace_of(tmp_path), cache("full:4,swa:4:32", 100), SCHEDULE, Timing(), engine="numpy")
    made = json.loads(json.dumps(document(outcome, "numpy", {"groups": "full:4,swa:4:32"})))
    assert made["options"] == {"groups": "full:4,swa:4:32"}
    assert [group["group"] for group in made["groups"]] == ["full:4", "swa:4:32"]
    assert list(made["groups"][0]["reasons"]) == list(REASONS)
    assert len(made["requests"]["hit"]) == made["totals"]["requests"] == 60
    assert sum(made["requests"]["hit"]) == made["totals"]["hit_tokens"]
    assert made["requests"]["outcome"].count(FINISHED) == made["totals"]["finished"]
    assert len({len(column) for column in made["steps"].values()}) == 1


def test_steps_of_time_stamps_are_exact():
    timing = Timing(step_ms=50)
    assert [timing.step_of(ms) for ms in (0, 1, 49.999, 50, 50.001, 100)] == [0, 1, 1, 1, 2, 2]
    assert Timing(step_ms=10, speed=Fraction("0.1")).step_of(1) == 1
    assert Timing(step_ms=1, speed=Fraction("0.001")).step_of(61.114) == 61114
    for wrong in ({"step_ms": 0}, {"speed": Fraction(0)}):
        with pytest.raises(ConfigError):
            Timing(**wrong)


def test_configurations_follow_the_dialect():
    config = cache("full:8,swa:4:20,mamba:16", 100).config
    assert (config.scheduler_block_size, config.hash_block_size) == (16, 4)
    assert config.max_in_flight_tokens == 64
    assert config.partial_hits
    assert not cache("full:8,swa:2:20,mamba:16,chunked:4:8", 100).config.partial_hits
    off = cache("full:8,mamba:16", 100, caching=False).config
    assert off.block_sizes == (8, 240)
    assert [spec_to_text(spec) for spec in config.topology.specs] == ["full:8", "swa:4:20", "mamba:16"]
    with pytest.raises(ConfigError, match="at least one group"):
        cache_config([], 100, SCHEDULE)


def chunk(chunking, prompt, start, budget, *, tokens=None, shared_boundary=0):
    return chunking.tokens(prompt, tokens or prompt, shared_boundary, start, budget)


@pytest.mark.parametrize(
    ("prompt", "start", "budget", "want", "more"),
    [
        (100, 0, 64, 64, {}),
        (100, 0, 70, 64, {}),  # not final: ends on a boundary
        (100, 64, 64, 32, {}),  # the last kept boundary, 96, before the end
        (100, 96, 64, 4, {}),
        (96, 64, 64, 16, {}),  # 96 tokens can be resumed at 80, not at 96
        (100, 20, 64, 12, {}),  # from within a block to its end
        (100, 0, 64, 32, {"shared_boundary": 40}),
        (100, 0, 10, 0, {}),  # the budget does not reach a boundary
        (90, 100, 64, 1, {"tokens": 101}),  # decoding
    ],
)
def test_chunks_end_where_states_are_kept(prompt, start, budget, want, more):
    assert chunk(Chunking(step_tokens=64, block_size=16), prompt, start, budget, **more) == want


def test_blocks_larger_than_a_step_and_states_inside_blocks():
    assert chunk(Chunking(step_tokens=10, block_size=16), 100, 0, 10) == 10
    assert chunk(Chunking(step_tokens=10, block_size=16), 100, 10, 10) == 6
    assert chunk(Chunking(step_tokens=64, block_size=16, hash_block_size=4), 30, 16, 64) == 12
    assert chunk(Chunking(step_tokens=64, block_size=16, eagle=True), 100, 64, 64) == 16
    assert chunk(Chunking(step_tokens=64), 100, 0, 70, shared_boundary=40) == 70


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when it is imported
@pytest.mark.parametrize(("text", "num_blocks"), TIGHT.items())
@pytest.mark.parametrize("options", [{}, {"eagle": ()}, {"retention_interval": 0}, {"caching": False}])
def test_lock_step_with_vllm(text, num_blocks, options, tmp_path):
    if "eagle" in options and "chunked" in text:
        options = {"eagle": (0,)}
    schedule = dataclasses.replace(SCHEDULE, lookahead=random.Random(text).randrange(3) if "eagle" in options else 0)
    config = cache(text, num_blocks, schedule, **options)
    for seed, kind in enumerate(DEFAULTS):
        outcome = replay(trace_of(tmp_path, kind, seed), config, schedule, Timing(), engine="vllm", check=True)
        check_outcome(outcome, schedule)


def test_check_wants_another_engine(tmp_path):
    with pytest.raises(ConfigError, match="other than numpy"):
        replay(trace_of(tmp_path), cache("full:4", 50), SCHEDULE, Timing(), engine="numpy", check=True)

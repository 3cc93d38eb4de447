"""No choice of evictions finds more than the bound: tried out in small caches, and drawn for the engine itself."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.dialects.rtp_llm.schedule.run import RtpReplayedCache, rtp_cache
from hkv.dialects.vllm.schedule.run import VllmReplayedCache, cache_config
from hkv.replay.optimal import BoundedPool, optimal_hits, reuse
from hkv.replay.result import totals
from hkv.replay.run import Timing, replay
from hkv.replay.schedule import Schedule
from hkv.replay.traces.interned import InternedTrace
from hkv.replay.traces.reader import TraceRequest
from hkv.spec import spec_from_text
from reference.state.free_queue import FreeQueue

SCHEDULE = Schedule(step_tokens=64, max_model_len=200)


def requests_of(prompts, outputs=None, every=10_000):
    outputs = outputs or [[9]] * len(prompts)
    return [
        TraceRequest(line=i + 1, timestamp=i * every, input_length=len(prompt), output_length=len(output),
                     tokens=list(prompt), output_tokens=list(output), tokens_per_id=1)
        for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]  # fmt: skip


def cache_of(text, num_blocks, schedule=SCHEDULE, **options):
    specs = [spec_from_text(part) for part in text.split(",")]
    return VllmReplayedCache(cache_config(specs, num_blocks, schedule, **options))


def bound(requests, cache, schedule=SCHEDULE):
    found = reuse(InternedTrace(requests), cache.hit_units, schedule.max_model_len)
    return int(optimal_hits(found, cache.pools, schedule.lookahead).sum())


def blocks_read(spec, prompt, n):
    """Names of the blocks that a query at `n` of a prompt reads: whole ones by their prefix, the last by its prompt."""
    size = spec.block_size
    indices = {position // size for part in spec.reads(n) for position in part}
    return {tuple(prompt[: (index + 1) * size]) for index in indices}


def held_at_the_end(spec, prompt):
    """Names of the blocks that the last token of a prompt reads or is written to."""
    last = len(prompt) - 1
    written = tuple(prompt[: (last // spec.block_size + 1) * spec.block_size])
    return {written} if spec.snapshot else blocks_read(spec, prompt, last) | {written}


def best_of_all(prompts, cache):
    """Most hit tokens of prompts computed one after the other, over every choice of what stays in the cache.

    All that a prompt brings may stay, also what an engine would not have computed or has given back.
    """
    specs, unit = dict(enumerate(cache.config.topology.specs)), cache.hit_units.unit
    best = {frozenset(): 0}
    for prompt in prompts:
        brought = {
            (g, tuple(prompt[:end]))
            for g, spec in specs.items()
            for end in range(spec.block_size, len(prompt) + 1, spec.block_size)
        }
        held = {(g, name) for g, spec in specs.items() for name in held_at_the_end(spec, prompt)}
        needed = {
            n: {(g, name) for g, spec in specs.items() for name in blocks_read(spec, prompt, n)}
            for n in range(0, len(prompt), unit)
        }
        after = {}
        for kept, hits in best.items():
            hit = max(n for n, names in needed.items() if names <= kept)
            others = sorted((kept | brought) - held)
            for chosen in itertools.combinations(others, min(cache.blocks - len(held), len(others))):
                now = frozenset({*chosen, *held})
                after[now] = max(after.get(now, 0), hits + hit)
        best = after
    return max(best.values())


PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), min_size=1, max_size=4)
"""Prompts of two tokens: most begin alike."""


@pytest.mark.parametrize(
    "text",
    ["full:2", "full:2,swa:2:3", "full:2,full:2", "full:4,full:2", "full:2,chunked:2:4", "full:2,mamba:2", "swa:2:3"],
)
@settings(max_examples=30)
@given(prompts=PROMPTS, spare=st.integers(0, 3))
def test_no_choice_of_what_stays_finds_more(text, prompts, spare):
    groups = text.count(",") + 1
    cache = cache_of(text, 1 + 4 * groups + spare)
    best, most = best_of_all(prompts, cache), bound(requests_of(prompts, [[]] * len(prompts)), cache)
    assert best <= most
    if text == "full:2":
        assert best == most, "with one group that reads everything, the bound is what can be reached"


@pytest.fixture
def evicting_at_random(monkeypatch):
    """Has the NumPy engine hand out any free block, and seeds the choice when called."""
    chance = random.Random()

    def pop(self):
        block = chance.choice(list(self))
        self.remove(block)
        return block

    monkeypatch.setattr(FreeQueue, "pop", pop)
    return chance.seed


CONCURRENT = Schedule(step_tokens=6, decode_tokens=1, max_running=3, max_model_len=40)


ALONE = dataclasses.replace(CONCURRENT, closed_loop=1)
"""With states, a chunk may end early for one, so that a later request passes: of concurrent replays nothing is said."""


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        *((text, CONCURRENT) for text in ("full:2", "full:2,swa:2:3", "full:2,full:4", "full:2,chunked:2:8")),
        ("mla:4,swa:2:5", CONCURRENT),
        *((text, ALONE) for text in ("full:2,mamba:2", "full:2,mamba:4,swa:2:3")),
    ],
)
def test_no_evictions_of_the_engine_find_more(text, schedule, evicting_at_random):
    """Requests that run together, wait for each other and are preempted, or come one by one; evictions are drawn."""
    found = preempted = 0
    for seed in range(60):
        chance = random.Random(seed)
        prompts = [[chance.randrange(2) for _ in range(chance.randint(1, 12))] for _ in range(8)]
        outputs = [[chance.randrange(2) for _ in range(chance.randint(0, 4))] for _ in prompts]
        requests = requests_of(prompts, None if schedule is ALONE else outputs, every=50)
        blocks = chance.randint(8 if schedule is ALONE else 5, 24)
        cache = cache_of(text, blocks, schedule, retention_interval=None)
        evicting_at_random(seed)
        sums = totals(replay(requests, cache, schedule, Timing()))
        assert sums["hit_tokens"] <= bound(requests, cache, schedule)
        found += sums["hit_tokens"]
        preempted += sums["preemptions"]
    assert found
    assert preempted or schedule is ALONE


def test_under_rtp_llms_rules(evicting_at_random):
    prompts = [[1] * 9, [2] * 9, [1] * 12, [2] * 9]
    specs = [spec_from_text("full:2"), spec_from_text("swa:2:2")]
    found = {}
    for counts in ((9, 9), (16, 9)):
        cache = RtpReplayedCache(rtp_cache("rtp-llm/hybrid-pool", specs, counts))
        found[counts] = bound(requests_of(prompts), cache)
        assert totals(replay(requests_of(prompts), cache, SCHEDULE, Timing()))["hit_tokens"] <= found[counts]
    assert found[9, 9] < found[16, 9] == 16


def test_the_prompt_that_runs_takes_room():
    """The first prompt's blocks have the room that the second's four leave. A pool in which the second may be refused
    says nothing of it; one that is too small for the third prompt has no hit."""
    requests = requests_of([[1] * 9, [2] * 8, [1] * 9], [[]] * 3)
    found = reuse(InternedTrace(requests), cache_of("full:2", 7).hit_units, 200)
    assert found.spans.tolist() == [[0, 2, 4]]
    for blocks, hit in ((3, 0), (4, 0), (5, 2), (6, 4), (7, 6), (8, 8), (100, 8)):
        pool = BoundedPool(blocks, [spec_from_text("full:2")])
        assert optimal_hits(found, [pool]).tolist() == [0, 0, hit]


def test_what_was_generated_costs_nothing():
    """The engine may compute an answer at any later time: its blocks are not known to have taken room."""
    requests = requests_of([[1] * 4, [2] * 8, [*[1] * 4, *[3] * 5]], [[3] * 4, [], []])
    found = reuse(InternedTrace(requests), cache_of("full:2", 7).hit_units, 200)
    assert found.spans.tolist() == [[0, 2, 2]]
    assert found.free.tolist() == [0, 0, 2]


def test_too_long_requests_are_left_out():
    requests = requests_of([[1] * 9, [1] * 9], [[], [9] * 300])
    assert len(reuse(InternedTrace(requests), cache_of("full:2", 7).hit_units, 200).spans) == 0


def test_ids_are_reused_as_tokens_are():
    ids = [TraceRequest(line=i, timestamp=i, input_length=20, output_length=0, hash_ids=[5, 6], tokens_per_id=10)
           for i in range(2)]  # fmt: skip
    found = reuse(InternedTrace(ids), cache_of("full:4", 7).hit_units, 200)
    assert found.spans.tolist() == [[0, 1, 4]], "the last token is always computed, and with it its block"
    assert np.array_equal(found.lengths, [20, 20])

"""Replays with LMCache behind the cache: its lookup, its server's order of eviction, and what a replay finds in it."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hkv.chunks.plans import ChunkRow, longest_prefix
from hkv.dialects.vllm.schedule.lmcache import LmcacheCache, ObjectKind, Objects, longest_hit, object_kinds
from hkv.dialects.vllm.schedule.tier import Tier
from hkv.errors import ConfigError
from hkv.replay.result import totals
from hkv.replay.run import Outcome, Timing, replay
from hkv.replay.traces.reader import TraceRequest
from hkv.spec import FullAttention, LayerSpec, Mamba, SlidingWindow
from tests.chunks import installed_lmcache
from tests.offload.test_replay import SCHEDULE, config, replayed, requests

CHUNK = 16

ROWS = st.integers(1, 9).flatmap(
    lambda chunks: st.tuples(
        st.just(chunks),
        st.lists(
            st.tuples(
                st.frozensets(st.integers(0, chunks - 1), min_size=chunks // 2), st.sampled_from([-1, 1, 2, 3, 12])
            ),
            min_size=1,
            max_size=4,
        ),
    )
)
"""A number of chunks; of each kind of object those that are there, and its window."""


def hit(rows: Any, chunks: int) -> int:
    kinds = [ObjectKind(None if window < 0 else window, ()) for _, window in rows]
    return longest_hit(kinds, lambda kind, chunk: chunk in rows[kind][0], chunks)


@given(ROWS)
def test_a_lookup_is_the_longest_prefix_that_every_kind_serves(drawn: Any) -> None:
    chunks, rows = drawn
    assert hit(rows, chunks) == longest_prefix([ChunkRow.of(*row) for row in rows], chunks).hit


@pytest.mark.lmcache
@pytest.mark.filterwarnings("ignore")
@given(ROWS)
def test_a_lookup_is_that_of_an_installed_lmcache(drawn: Any) -> None:
    chunks, rows = drawn
    assert hit(rows, chunks) == installed_lmcache.longest_prefix(rows, chunks).hit


@pytest.mark.lmcache
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(20))
def test_what_leaves_is_what_an_installed_policy_chooses(seed: int) -> None:
    """Objects are reserved, written, used and pinned alike; then both evict, a fifth of what is there at a time."""
    from lmcache.v1.distributed.eviction_policy.lru import LRUEvictionPolicy

    draw, theirs, mine = random.Random(seed), LRUEvictionPolicy(), Objects(40)
    pinned = set[int]()
    for _ in range(30):
        chosen = [(key, 0) for key in draw.sample(range(60), draw.randrange(1, 5))]
        if draw.random() < 0.6:
            new = mine.reserve(chosen, 1)
            theirs.on_keys_reserved(new)  # type: ignore[arg-type]
            mine.written(new)
            theirs.on_keys_created(new)  # type: ignore[arg-type]
        else:
            mine.touch(chosen)
            theirs.on_keys_touched(chosen)  # type: ignore[arg-type]
    for key in draw.sample(range(60), 5):
        if mine.ready((key, 0)):
            mine.pin([(key, 0)])
            pinned.add(key)
    while mine.used >= 32:
        before = {(key, 0) for key in range(60) if mine.ready((key, 0))}
        (action,) = theirs.get_eviction_actions(0.2, lambda key: key[0] not in pinned)
        assert mine.tick()
        gone = {key for key in before if not mine.ready(key)}
        assert gone == set(action.keys)
        theirs.on_keys_removed(action.keys)


# Objects of a cache.


def test_kinds_of_objects_are_by_window_in_chunks_and_states() -> None:
    windows = [SlidingWindow(block_size=4, window=each) for each in (8, 16, 17)]
    kinds = object_kinds(config([FullAttention(block_size=4), *windows, Mamba(block_size=8)], 90, 60), CHUNK)
    assert [(kind.window, kind.kept, kind.blocks) for kind in kinds] == [
        *((None, ((0, 4),), 4), (1, ((1, 2), (2, 4)), 6), (2, ((3, 4),), 4)),
        (1, ((4, 1),), 1),
    ]


@pytest.mark.parametrize(
    ("specs", "chunk", "said"),
    [
        ([FullAttention(block_size=4)], 18, "offload_chunk_tokens = 18: expected a multiple of group 0's block of 4"),
        ([SlidingWindow(block_size=4, window=9)], 16, r"groups\[0\].window = 9: expected whole blocks of 4"),
    ],
)
def test_what_lmcache_refuses_is_refused(specs: list[LayerSpec], chunk: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        object_kinds(config(specs, 90, 60), chunk)


# Replays.


def with_lmcache(trace: list[TraceRequest], specs: list[LayerSpec], blocks: int, chunks: int, **more: Any) -> Outcome:
    tier = config(specs, blocks, chunks, bugs=frozenset(), **more)
    plain = dataclasses.replace(tier, cache=dataclasses.replace(tier.cache, offloads=False))
    return replay(trace, LmcacheCache(Tier(config=plain), CHUNK, 20), SCHEDULE, Timing(step_ms=50), causes=False)


def again(prompt: int, others: int = 6) -> list[TraceRequest]:
    """A prompt, others one after the other, by which the GPU forgets it, and the prompt again."""
    tokens = [at % 5 for at in range(prompt)]
    each = {"input_length": prompt, "output_length": 1, "tokens_per_id": 1, "output_tokens": [0]}
    prompts = [tokens, *([number, *tokens[1:]] for number in range(1, 1 + others)), tokens]
    return [TraceRequest(line=at + 1, timestamp=at * 1_000, tokens=each_, **each) for at, each_ in enumerate(prompts)]


FULL, WINDOW, STATE = FullAttention(block_size=4), SlidingWindow(block_size=4, window=8), Mamba(block_size=16)


@pytest.mark.parametrize(
    ("specs", "prompt", "loaded"),
    [
        ([FULL], 50, 48),
        ([FULL], 48, 47),
        ([FULL, WINDOW], 50, 48),
        ([FULL, WINDOW, STATE], 50, 48),
        ([FULL, STATE], 48, 32),
    ],
)
def test_whole_chunks_of_a_prompt_are_loaded_and_its_last_token_is_computed(
    specs: list[LayerSpec], prompt: int, loaded: int
) -> None:
    """Beside states the last token is left out of the lookup; else it is computed again."""
    outcome = with_lmcache(again(prompt), specs, 40, 400)
    assert outcome.recorder.requests[7].loaded == loaded


def test_objects_take_the_blocks_that_are_kept_and_leave_by_the_second() -> None:
    numbers = totals(with_lmcache(again(50, others=5), [FULL, WINDOW], 40, 400))
    assert numbers["tier_stored"] == 6 * 3 * (4 + 2)
    assert numbers["tier_evicted"] == numbers["tier_refused"] == 0
    crowded = totals(with_lmcache(again(50, others=5), [FULL, WINDOW], 40, 40))
    assert crowded["tier_peak"] <= 40
    assert crowded["tier_evicted"] > 0


@pytest.mark.parametrize("specs", [[FULL], [FULL, WINDOW], [FULL, Mamba(block_size=16)]])
def test_drawn_traffic_adds_up(specs: list[LayerSpec]) -> None:
    for seed in range(3):
        trace = requests(seed)
        outcome = with_lmcache(trace, specs, 60, 120)
        assert all(record.outcome == "finished" for record in outcome.recorder.requests.values())
        numbers = totals(outcome)
        assert 0 < numbers["tier_read"] <= numbers["tier_stored"]
        assert 0 < numbers["loaded_tokens"] <= numbers["hit_tokens"]
        roomy = totals(with_lmcache(trace, specs, 60, 10_000))
        native = totals(replayed(trace, config(specs, 60, 10_000)))
        assert roomy["tier_evicted"] == native["tier_evicted"] == 0
        assert roomy["hit_tokens"] < native["hit_tokens"] + CHUNK * len(trace)

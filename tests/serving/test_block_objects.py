"""vLLM's rules for `store` and `load`: what is stored of a prompt, and what is loaded, as the reference has it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hkv.dialects.vllm.offload.config import BUGS, OffloadConfig
from hkv.dialects.vllm.schedule.run import cache_config
from hkv.replay.schedule import Schedule
from hkv.serving.block_objects import longest_load, offered
from hkv.spec import ChunkedLocal, FullAttention, Mamba, SlidingWindow, retained_sparsely
from tests.offload import asked

SCHEDULE = Schedule(step_tokens=64, max_model_len=1024)

FULL = st.builds(FullAttention, block_size=st.sampled_from([4, 8]))
WINDOW = st.builds(SlidingWindow, block_size=st.sampled_from([4, 8]), window=st.integers(1, 24))
OTHERS = st.one_of(FULL, WINDOW, st.just(Mamba(block_size=8)), st.just(ChunkedLocal(block_size=8, chunk=16)))


@st.composite
def rules(draw: st.DrawFn) -> OffloadConfig:
    """Rules of a cache of up to three groups, with vLLM's defects or without."""
    specs = [draw(FULL), *draw(st.lists(OTHERS, max_size=2))]
    intervals = [None, 0, 64] if any(map(retained_sparsely, specs)) else [None, 0]
    cache = cache_config(specs, 100, SCHEDULE, retention_interval=draw(st.sampled_from(intervals)))
    return OffloadConfig(cache=cache, num_chunks=99, bugs=frozenset(BUGS) if draw(st.booleans()) else frozenset())


@given(rules(), st.data())
def test_what_is_stored_is_what_the_reference_offers(given_rules: OffloadConfig, data: st.DataObject) -> None:
    prompt = data.draw(st.integers(1, 200))
    computed, shared = data.draw(st.integers(0, 200)), data.draw(st.sampled_from([0, 40]))
    found = offered(given_rules, prompt, computed, shared)
    for group, size in enumerate(given_rules.chunk_tokens):
        if group in given_rules.aligned:  # whose states the cache hands over
            continue
        wanted = asked.offered_chunks(given_rules, prompt, group, min(computed, prompt) // size, shared)
        assert found[group] == wanted


@given(rules(), st.data())
def test_what_is_loaded_is_what_the_reference_finds(given_rules: OffloadConfig, data: st.DataObject) -> None:
    """Of the longest lengths at which a cache resumes; a search that ends inside a block goes on before it."""
    unit = given_rules.cache.scheduler_block_size
    tokens = data.draw(st.integers(1, 120))
    local = data.draw(st.integers(0, max(0, tokens - 1) // unit)) * unit
    keys = [[(place, group) for place in range(tokens // size)] for group, size in enumerate(given_rules.chunk_tokens)]
    every = [key for row in keys for key in row]
    absent = set(data.draw(st.lists(st.sampled_from(every), max_size=4))) if every else set()
    present = [{place for place, group in row if (place, group) not in absent} for row in keys]

    end = (tokens - 1) // unit * unit
    while True:
        asks = end + bool(given_rules.windows)
        found, wanted = asked.found(given_rules, lambda *key: key not in absent, asks, local)
        if not found or (local + found) % unit == 0:
            break
        end = (local + found) // unit * unit
    loaded = longest_load(given_rules, present, local, tokens)
    assert (0 if loaded is None else loaded.end - local) == found
    if loaded is not None:
        assert [(place, group) for group, places in enumerate(loaded.chunks) for place in places] == wanted


@pytest.mark.parametrize("window", [8, 9])
def test_a_window_of_a_token_more_than_blocks_is_found_without_the_defect_alone(window: int) -> None:
    for bugs, hits in ((frozenset(BUGS), window == 8), (frozenset[str](), True)):
        specs = [FullAttention(block_size=4), SlidingWindow(block_size=4, window=window)]
        cache = cache_config(specs, 100, SCHEDULE, retention_interval=0)
        config = OffloadConfig(cache=cache, num_chunks=99, bugs=bugs)
        present = [set(row) for row in offered(config, 42, 42, 0)]
        assert (longest_load(config, present, 0, 42) is not None) == hits

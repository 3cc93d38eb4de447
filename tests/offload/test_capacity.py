"""Room of a second tier: chunks that prompts take, as the reference offers them; vLLM's own figure."""

from __future__ import annotations

import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hkv.dialects.vllm.offload.capacity import (
    held_tokens,
    longest_prompt,
    planned_tier,
    reported_tokens,
    stored_chunks,
)
from hkv.dialects.vllm.offload.config import BUGS, OffloadConfig
from hkv.dialects.vllm.planning.engine_options import EngineOptions
from hkv.dialects.vllm.planning.engine_plan import plan
from hkv.dialects.vllm.schedule.run import cache_config
from hkv.errors import ConfigError
from hkv.replay.schedule import Schedule
from hkv.spec import ChunkedLocal, FullAttention, LayerSpec, Mamba, SlidingWindow
from tests.offload.asked import offered_chunks

SCHEDULE = Schedule(step_tokens=64, max_running=4, max_model_len=4096)


def tier(*specs: LayerSpec, chunks: int = 1_000, retention: int | None = 0, **options: Any) -> OffloadConfig:
    cache = cache_config(specs, 100, SCHEDULE, retention_interval=retention)
    more = {"bugs": frozenset(BUGS), "step_tokens": SCHEDULE.step_tokens, **options}
    return OffloadConfig(cache=cache, num_chunks=chunks, **more)


FULL = FullAttention(block_size=16)


@given(st.data())
def test_a_prompt_takes_the_chunks_that_the_reference_offers(data: st.DataObject) -> None:
    """Windows among groups of one block and of several, with every retention and EAGLE."""
    sizes = data.draw(st.sampled_from([(16, 16), (64, 16), (32, 16), (16, 32)]))
    window = SlidingWindow(block_size=sizes[1], window=data.draw(st.integers(1, 200)))
    retention, per_chunk = data.draw(st.sampled_from([(None, 1), (0, 1), (64, 1), (256, 1), (None, 2), (0, 2)]))
    eagle = data.draw(st.sampled_from([(), (1,)]))
    config = tier(
        *(FullAttention(block_size=sizes[0]), window), retention=retention, eagle=eagle, blocks_per_chunk=per_chunk
    )
    tokens = data.draw(st.integers(1, 700))
    for group, size in enumerate(config.chunk_tokens):
        offered = offered_chunks(config, tokens, group, tokens // size)
        assert stored_chunks(config, tokens)[group] == len(offered)


def test_states_count_by_the_lengths_that_keep_one() -> None:
    mamba = Mamba(block_size=16)
    assert [stored_chunks(tier(FULL, mamba, retention=each), 640)[1] for each in (0, 128, None)] == [1, 6, 10]


def test_the_longest_prompt_fits_and_a_chunk_more_does_not() -> None:
    config = tier(FULL, SlidingWindow(block_size=16, window=64), chunks=104)
    fits = longest_prompt(config, 10_000)
    assert (sum(stored_chunks(config, fits)), sum(stored_chunks(config, fits + 1))) == (104, 105)
    assert longest_prompt(config, 80) == 80


WINDOWS = (SlidingWindow(block_size=16, window=32), SlidingWindow(block_size=16, window=48))


def test_vllm_counts_windows_that_are_stored_whole_as_their_lookups() -> None:
    dense, sparse = (tier(FULL, *WINDOWS, chunks=3_000, retention=each) for each in (None, 0))
    assert (reported_tokens(dense, 4096), held_tokens(dense, 4096)) == (47_080, 16_000)
    assert (reported_tokens(sparse, 4096), held_tokens(sparse, 4096)) == (47_080, 47_080)


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_vllm_reports_that_figure() -> None:
    from vllm.v1.kv_offload.cpu.common import CPUOffloadingInfo

    for config in (tier(FULL, *WINDOWS), tier(FULL, ChunkedLocal(block_size=16, chunk=100), chunks=77)):
        groups = [
            types.SimpleNamespace(tokens_per_block=size, sliding_window_size_in_chunks=config.window(group))
            for group, size in enumerate(config.cache.block_sizes)
        ]
        given = types.SimpleNamespace(
            model=types.SimpleNamespace(max_model_len=4096),
            groups=groups,
            cache=types.SimpleNamespace(blocks_per_chunk=config.blocks_per_chunk),
        )
        told = CPUOffloadingInfo.from_config(given, config.num_chunks, 4096)
        assert told.cpu_kv_cache_size_tokens == reported_tokens(config, 4096)


def test_a_plan_says_what_the_tier_holds() -> None:
    found = planned_tier(plan("gpt-oss-20b", "8GiB"), 1).record()
    assert (found["num_chunks"], found["chunk_bytes"]) == (2730, 384 << 10)
    assert found["chunks_of_longest_prompt"] == [8, 8192]
    assert (found["tokens"], found["cpu_kv_cache_size_tokens"]) == (43_637, 43_637)
    assert found["longest_prompt_that_fits"] == 43_567


def test_equal_latents_are_kept_once() -> None:
    def chunk(**options: Any) -> int:
        return planned_tier(plan("deepseek-v3", "80GiB", options=EngineOptions(**options)), 64).chunk_bytes

    assert chunk(tensor_parallel_size=8) == chunk()
    assert chunk(tensor_parallel_size=4, pipeline_parallel_size=2) > 4 * chunk() // 2


def test_a_tier_of_no_chunk_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_offloading_size = 1e-06: expected at least a chunk of 393,216 bytes"):
        planned_tier(plan("gpt-oss-20b", "8GiB"), 1e-6)

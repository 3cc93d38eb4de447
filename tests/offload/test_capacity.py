"""Room of a second tier: chunks that prompts take, as the reference offers them; vLLM's own figure; warnings."""

from __future__ import annotations

import json
import pathlib
import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hkv.contract import registry
from hkv.dialects.vllm.offload import log as structs
from hkv.dialects.vllm.offload.capacity import (
    held_tokens,
    longest_prompt,
    planned_tier,
    reported_tokens,
    stored_chunks,
    warnings,
)
from hkv.dialects.vllm.offload.config import BUGS, OffloadConfig
from hkv.dialects.vllm.planning.engine_options import EngineOptions
from hkv.dialects.vllm.planning.engine_plan import plan
from hkv.dialects.vllm.schedule.run import cache_config
from hkv.errors import ConfigError
from hkv.oracle.log_file import Log
from hkv.replay.schedule import Schedule
from hkv.spec import ChunkedLocal, FullAttention, LayerSpec, Mamba, SlidingWindow
from reference.dialects.vllm.offload.offers import Progress, offered_chunks
from reference.dialects.vllm.request import Request
from tests.cli.commands import run

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
    request = Request("a", tokens, tokens, [])
    for group, size in enumerate(config.chunk_tokens):
        count = tokens // size
        progress = Progress(finished=False, chunks=count, prompt=count, cursor=0)
        _, offered = offered_chunks(config, request, group, [1] * (count * per_chunk), progress)
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
    (text,) = warnings(dense, 4096)
    assert text == "vLLM's cpu_kv_cache_size_tokens says 47,080 tokens; of prompts of 4,096 the tier holds 16,000"
    assert warnings(sparse, 4096) == []


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


@pytest.mark.parametrize(("window", "retention", "warned"), [(33, 0, True), (32, 0, False), (33, None, False)])
def test_a_window_of_a_token_more_than_chunks_is_warned_of_where_tails_alone_are_stored(
    window: int, retention: int | None, warned: bool
) -> None:
    config = tier(FULL, SlidingWindow(block_size=16, window=window), retention=retention)
    said = [text for text in warnings(config, 4096) if "swa:16:33" in text]
    assert len(said) == warned
    for text in said:
        assert "2 are stored and 3 looked for" in text
        assert "window-past-a-chunk-never-hits" in text
        assert warnings(tier(*config.cache.topology.specs, bugs=frozenset()), 4096) == []


def test_long_prompts_and_steps_that_a_tier_has_no_room_for() -> None:
    (long,) = warnings(tier(FULL, chunks=10), 320)
    assert long.startswith("prompts of more than 175 tokens do not fit into 10 chunks")
    (step,) = warnings(tier(FULL, chunks=3), 320)
    assert step.startswith("a step of 64 tokens of one prompt offers up to 4 new chunks to a tier of 3 chunks")
    assert warnings(tier(FULL, chunks=3), 48) == []


# Commands that warn.


def test_a_plan_says_what_the_tier_holds() -> None:
    found = planned_tier(plan("gpt-oss-20b", "8GiB"), 1).record()
    assert (found["num_chunks"], found["chunk_bytes"]) == (2730, 384 << 10)
    assert found["chunks_of_longest_prompt"] == [8, 8192]
    assert (found["tokens"], found["cpu_kv_cache_size_tokens"]) == (43_637, 43_637)
    assert [text[:32] for text in found["warnings"]] == ["prompts of more than 43,567 token"[:32]]


def test_equal_latents_are_kept_once() -> None:
    def chunk(**options: Any) -> int:
        return planned_tier(plan("deepseek-v3", "80GiB", options=EngineOptions(**options)), 64).chunk_bytes

    assert chunk(tensor_parallel_size=8) == chunk()
    assert chunk(tensor_parallel_size=4, pipeline_parallel_size=2) > 4 * chunk() // 2


def test_a_tier_of_no_chunk_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_offloading_size = 1e-06: expected at least a chunk of 393,216 bytes"):
        planned_tier(plan("gpt-oss-20b", "8GiB"), 1e-6)


def test_sweeps_warn_of_each_tier(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, found = tmp_path / "t.jsonl", tmp_path / "found.json"
    line = {"timestamp": 0, "input_length": 100, "output_length": 1, "tokens": list(range(100))}
    trace.write_text(json.dumps(line) + "\n")
    cache = ("--groups", "full:16,swa:16:33", "--num-blocks", "50;60", "--offload", "4,20")
    _, _, errors = run(
        monkeypatch, capsys, "sweep", str(trace), *cache, "--engine", "numpy", "--jobs", "1", "--json", str(found)
    )
    assert errors.count("hkv: warning: --num-blocks 50 --offload 4: swa:16:33") == 1
    assert "hkv: warning: --num-blocks 50 --offload 4: a step of 100 tokens" in errors
    assert len(json.loads(found.read_text())["warnings"]) == errors.count("hkv: warning") == 2


def test_logs_are_warned_of() -> None:
    full = {"kind": "full_attention", "block_size": 16}
    header = structs.Header(
        dialect=structs.OFFLOAD,
        feature="hand",
        num_blocks=[40, 20],
        groups=[full, {"kind": "sliding_window", "block_size": 16, "window": 33}],
        bugs=sorted(BUGS),
    )
    operations = (structs.RequestOp(id="a", tokens=list(range(40)), output=1),)
    found = registry.dialect_of(structs.OFFLOAD).warnings(Log("log", header, operations))
    assert len(found) == 1
    assert "swa:16:33" in found[0]

"""Options that vLLM 0.33 refuses of a model, held against its recorded configs."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

from benchmarks.judges.recorded import records
from hkv.dialects.vllm.planning.engine_options import EngineOptions
from hkv.dialects.vllm.planning.engine_plan import plan_config
from hkv.dialects.vllm.planning.kernels import EXPERTS, WITH_EXPERTS
from hkv.errors import ConfigError, HKVError
from hkv.model.huggingface.reading import decoder_fields


def test_types_with_experts_are_those_whose_default_config_has_some() -> None:
    found: dict[str, set[bool]] = {}
    for record in records("library"):
        try:
            fields = decoder_fields(record["config"])
        except HKVError:
            continue
        stated = [fields.values[name] for name in EXPERTS if fields.values.get(name) is not None]
        found.setdefault(fields.model_type, set()).add(bool(stated and stated[0]))
    assert {name for name, some in found.items() if some == {True}} == WITH_EXPERTS
    assert all(len(some) == 1 for some in found.values())


DATA = pathlib.Path(__file__).parent.parent / "data" / "models"
OPTIONS = EngineOptions(kv_cache_memory_bytes=80 << 30, max_model_len=1024)


@pytest.mark.parametrize(
    ("name", "device", "kv_cache_dtype", "taken"),
    [
        ("devstral-2-123b", "h200", "fp8_e5m2", False),  # its checkpoint has scales for the other floats
        ("devstral-2-123b", "h200", "fp8", True),
        ("llama-3.1-8b", "h200", "fp8_e5m2", True),
        ("gemma-4-31b", "a100", "fp8", False),  # tokens of an image read each other
        ("gemma-4-31b", "l40s", "fp8", True),
        ("gemma-4-31b", "a100", "fp8_e5m2", False),  # heads of two sizes
        ("gpt-oss-20b", "a100", "fp8_e5m2", False),
        ("gpt-oss-20b", "h100", "fp8_e5m2", True),
        ("gemma-4-e2b", "a100", "fp8", False),  # heads of two sizes
        ("gemma-4-e2b", "l40s", "fp8", True),
        ("llama-3.1-8b", "a100", "fp8_e4m3", True),
        ("llama-3.1-8b", "a100", "fp8_per_token_head", False),
        ("falcon-mamba-7b", "a100", "fp8_per_token_head", True),  # states alone, which it is not about
    ],
)
def test_one_byte_caches_need_kernels_and_a_checkpoint_that_take_them(
    name: str, device: str, kv_cache_dtype: str, taken: bool
) -> None:
    options = dataclasses.replace(OPTIONS, device=device, kv_cache_dtype=kv_cache_dtype)
    if taken:
        assert plan_config(name, options).concurrency > 1
    else:
        with pytest.raises(ConfigError, match="kv_cache_dtype"):
            plan_config(name, options)


@pytest.mark.parametrize("device", ["a100", "l40s"])
def test_sparse_latents_need_hopper(device: str) -> None:
    with pytest.raises(ConfigError, match="device = "):
        plan_config("deepseek-v3.2", dataclasses.replace(OPTIONS, device=device))
    assert plan_config("deepseek-v3", dataclasses.replace(OPTIONS, device=device)).concurrency > 1


def test_a_step_takes_a_whole_video_where_its_tokens_read_each_other() -> None:
    for name, tokens in (("gemma-4-26b-a4b", 2496), ("gemma-4-e2b", 2048), ("gemma-3-27b", 2048)):
        options = dataclasses.replace(OPTIONS, usage_context="OPENAI_BATCH_RUNNER")
        assert plan_config(name, options).settings.max_num_batched_tokens == tokens
        few = dataclasses.replace(options, max_num_batched_tokens=512)
        assert plan_config(name, few).settings.max_num_batched_tokens == 512


def test_nothing_bounds_a_request_where_no_field_does() -> None:
    assert plan_config("falcon-mamba-7b", dataclasses.replace(OPTIONS, max_model_len=8192)).max_model_len == 8192
    with pytest.raises(ConfigError, match="max_model_len = 'auto'"):
        plan_config("falcon-mamba-7b", dataclasses.replace(OPTIONS, max_model_len=-1))
    with pytest.raises(ConfigError, match="max_model_len = 200000"):
        plan_config("llama-3.1-8b", dataclasses.replace(OPTIONS, max_model_len=200_000))


@pytest.mark.parametrize(
    ("device", "kv_cache_dtype", "block_size", "num_blocks"),
    [
        ("l40s", "fp8_e4m3", 128, 1842),  # vLLM 0.33 answered these three
        ("l40s", "fp8_e4m3", 256, 1842),
        ("l40s", "fp8_e4m3", 64, 1842),
        ("h100", "fp8_e4m3", 128, 921),
    ],
)
def test_windows_alone_take_the_largest_block_of_their_kernels(
    device: str, kv_cache_dtype: str, block_size: int, num_blocks: int
) -> None:
    options = EngineOptions(
        device=device, kv_cache_dtype=kv_cache_dtype, block_size=block_size, kv_cache_memory_bytes=7728685217
    )
    assert plan_config(DATA / "mistral.json", options).num_blocks == num_blocks

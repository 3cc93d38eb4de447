"""Released models under every type of the cache on five GPUs: HKV's plans against vLLM 0.33's own."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

from benchmarks.cache_type_records import DEVICES, TypeAnswers, asking, differences, recorded
from hkv.dialects.vllm.planning.engine_options import EngineOptions
from hkv.dialects.vllm.planning.engine_plan import plan_config
from hkv.dialects.vllm.planning.speculation import Speculation
from hkv.errors import ConfigError
from hkv.model.huggingface import load_config

PATH = pathlib.Path(__file__).resolve().parent.parent / "data" / "planning" / "cache_types.jsonl.gz"

RECORDS = list(recorded(PATH))
"""Answers of vLLM 0.33.0 that `benchmarks/compare_cache_types.py --record` wrote."""

FILES = asking()

STEP = 8
"""Each model's answers are looked at this far apart, beginning at another for each model."""


@pytest.mark.parametrize(("first", "record"), list(enumerate(RECORDS)), ids=[record.model for record in RECORDS])
def test_every_type_is_planned_as_vllm_does(first: int, record: TypeAnswers) -> None:
    asks = record.model in FILES  # for a type of its own, so that it was started with `auto` alone
    config = FILES[record.model] if asks else load_config(record.model)
    found = differences(config, record, *(() if asks else (first % STEP, STEP)))
    assert [str(difference) for difference in found if not difference.known] == []


def test_the_records_are_worth_it() -> None:
    answers = [answer for record in RECORDS for answer in record.answers()]
    assert {device for device, _, _ in answers} == set(DEVICES)
    assert len({dtype for _, dtype, _ in answers}) == 22
    assert 0 < sum(answer is None for _, _, answer in answers) < len(answers)


@pytest.mark.parametrize(
    ("model", "device", "dtype", "blocks"),
    [
        ("deepseek-v3.2", "h100", "fp8", 27922),
        ("deepseek-v3.2", "b200", "fp8", 31077),
        ("deepseek-v3.2", "rtx5090", "auto", 27922),
        ("llama-3.1-8b", "rtx4090", "nvfp4", 145635),
    ],
)
def test_what_is_stored_follows_from_the_kernels(model: str, device: str, dtype: str, blocks: int) -> None:
    options = EngineOptions(device=device, kv_cache_dtype=dtype, kv_cache_memory_bytes=80 << 30)
    assert plan_config(load_config(model), options).num_blocks == blocks


@pytest.mark.parametrize(
    ("model", "device", "dtype", "expected"),
    [
        ("deepseek-v3.2", "h100", "fp8_e4m3", "fp8_ds_mla"),
        ("deepseek-v3.2", "a100", "auto", "no kernels there for such latents with an indexer"),
        ("llama-3.1-8b", "h100", "octave_k3v4", "turboquant_k8v4"),
        ("falcon-mamba-7b", "h100", "float8", "nvfp4"),
    ],
)
def test_what_no_kernel_takes_is_refused(model: str, device: str, dtype: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        plan_config(
            load_config(model), EngineOptions(device=device, kv_cache_dtype=dtype, kv_cache_memory_bytes=80 << 30)
        )


def test_a_block_that_no_kernel_takes_is_refused() -> None:
    options = EngineOptions(device="h100", block_size=24, kv_cache_memory_bytes=80 << 30)
    with pytest.raises(ConfigError, match="block_size = 24"):
        plan_config(load_config("deepseek-v3"), options)


def test_a_type_that_the_checkpoint_asks_for_is_refused_like_one_of_the_option() -> None:
    config, options = FILES["glm-5.1-nvfp4"], EngineOptions(device="h100", kv_cache_memory_bytes=80 << 30)
    expected = r"kv_cache_dtype = 'fp8_e4m3': expected one of float16, .*fp8_ds_mla.*\(auto is fp8_e4m3 here\)"
    with pytest.raises(ConfigError, match=expected):
        plan_config(config, options)
    assert plan_config(config, dataclasses.replace(options, kv_cache_dtype="fp8_ds_mla")).num_blocks == 21836


def test_a_draft_has_the_type_that_its_target_s_checkpoint_asks_for() -> None:
    config, draft = load_config("llama-3.1-8b"), load_config("llama-3.2-1b")
    speculation = Speculation(method="draft_model", num_speculative_tokens=2, model="llama-3.2-1b")
    options = EngineOptions(device="h100", kv_cache_memory_bytes=80 << 30, speculation=speculation)
    asking_for_it = config | {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}}
    stated = plan_config(config, dataclasses.replace(options, kv_cache_dtype="fp8_e4m3"), draft=draft)
    assert plan_config(asking_for_it, options, draft=draft).num_blocks == stated.num_blocks
    assert plan_config(config, options, draft=draft).num_blocks < stated.num_blocks

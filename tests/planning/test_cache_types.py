"""Released models under every type of the cache on five GPUs: HKV's plans against vLLM 0.33's own."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

from benchmarks.cache_type_records import DEVICES, TypeAnswers, asking, differences, recorded
from benchmarks.judges.recorded import records
from hkv.dialects.vllm.planning.engine_options import EngineOptions
from hkv.dialects.vllm.planning.engine_plan import plan_config
from hkv.dialects.vllm.planning.kernels import EXPERTS, WITH_EXPERTS
from hkv.dialects.vllm.planning.speculation import Speculation
from hkv.errors import ConfigError, HKVError
from hkv.model.huggingface import load_config
from hkv.model.huggingface.reading import decoder_fields

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


# Options that vLLM 0.33 refuses of a model, held against its recorded configs.


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

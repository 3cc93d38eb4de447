"""Start-up numbers and settings: HKV's against those that vLLM 0.33 itself printed."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest
from click.testing import CliRunner

import hkv
from benchmarks.startup_records import difference, records_by_model
from hkv.cli import cli
from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.plan_command import size_of_weights
from hkv.dialects.vllm.planning.engine_options import DEVICES, EngineOptions, device_of, reported_memory
from hkv.dialects.vllm.planning.engine_plan import plan_config
from hkv.dialects.vllm.planning.speculation import Speculation, parse_speculation
from hkv.errors import ConfigError, HKVError, PlanError
from hkv.model.huggingface import load_config

DATA = pathlib.Path(__file__).resolve().parent.parent / "data"
OPTIONS = EngineOptions(kv_cache_memory_bytes=80 << 30)


def config(name: str) -> dict[str, Any]:
    return json.loads((DATA / "models" / f"{name}.json").read_text())


RECORDS = records_by_model(DATA / "planning" / "startup.jsonl.gz")
"""Starts of vLLM 0.33.0: every fifth of 2,000 that `benchmarks/compare_startup.py --record` wrote."""


def assert_starts_agree(content: dict[str, Any], records: list[dict[str, Any]]) -> None:
    """A model starts as in every record."""
    for record in records:
        found = difference(content, record)
        assert found is None, f"{found}: {record}"


@pytest.mark.parametrize("model", RECORDS)
def test_starts_as_vllm_does(model: str) -> None:
    assert_starts_agree(config(model), RECORDS[model])


def test_the_records_are_worth_it() -> None:
    """Each setting has two values at least, and refusals are among the answers."""
    starts = [record["vllm"] for each in RECORDS.values() for record in each]
    planned = [start for start in starts if "line" in start]
    assert len(starts) > 400
    assert len(planned) < len(starts)
    for name in planned[0]:
        assert len({start[name] for start in planned}) > 1, name


@pytest.mark.parametrize(
    ("model", "tokens", "extra", "line"),
    [
        ("deepseek_v3", 1, {}, "1,202,656 tokens, Maximum concurrency for 4,096 tokens per request: 293.62x"),
        ("deepseek_v3", 2, {"num_nextn_predict_layers": 2}, "1,183,568 tokens, Maximum concurrency for 4,096 "),
        ("deepseek_v4", 1, {}, "8,693,023 tokens, Maximum concurrency for 1,048,576 tokens per request: 8.29x"),
        ("qwen3_next", 2, {}, "2,549,077 tokens, Maximum concurrency for 32,768 tokens per request: 77.79x"),
        ("qwen3_5_moe_text", 1, {}, "3,143,353 tokens, Maximum concurrency for 32,768 tokens per request: 95.93x"),
    ],
)
def test_mtp_layers_of_the_target(model: str, tokens: int, extra: dict[str, int], line: str) -> None:
    """Lines that vLLM 0.33.0 logged for the same configs, with its own MTP classes next to the model's."""
    speculation = Speculation(method="mtp", num_speculative_tokens=tokens)
    plan = plan_config(config(model) | extra, dataclasses.replace(OPTIONS, speculation=speculation))
    assert line in plan.startup.line
    assert any(group.eagle for group in plan.served.plan.groups)


@pytest.mark.parametrize(
    ("method", "scaling", "length"),
    [("eagle", None, 8192), ("eagle", {"rope_type": "yarn", "factor": 1.0}, 2048), ("draft_model", None, 2048)],
)
def test_a_draft_bounds_requests_where_it_cannot_follow(method: str, scaling: Any, length: int) -> None:
    target = config("llama") | {"max_position_embeddings": 8192}
    draft = config("llama") | {"num_hidden_layers": 1, "max_position_embeddings": 2048, "rope_scaling": scaling}
    speculation = Speculation(method=method, num_speculative_tokens=2, model="its config")
    plan = plan_config(target, dataclasses.replace(OPTIONS, speculation=speculation), draft=draft)
    assert plan.max_model_len == length
    assert len(plan.served.plan.groups[0].names) == 33


def test_mtp_of_a_model_without_it_is_refused() -> None:
    speculation = Speculation(method="mtp", num_speculative_tokens=1)
    with pytest.raises(ConfigError, match="llama"):
        plan_config(config("llama"), dataclasses.replace(OPTIONS, speculation=speculation))


@pytest.mark.parametrize(
    ("model", "changed"),
    [
        ("llama", {"kv_cache_dtype": "nvfp4_4over6"}),
        ("deepseek_v3", {"kv_cache_dtype": "nvfp4", "device": "b200"}),
        ("deepseek_v3", {"kv_cache_dtype": "int8_per_token_head"}),
        ("deepseek_v3", {"kv_cache_dtype": "fp8", "device": "a100"}),
        ("llama", {"max_model_len": 2049}),
        ("llama", {"kv_cache_dtype": "float16"}),
        ("llama", {"kv_cache_dtype": "float32"}),
        ("gemma3_text", {"kv_cache_dtype": "turboquant_k8v4"}),
        ("deepseek_v3", {"kv_cache_dtype": "turboquant_k8v4"}),
        ("llama", {"decode_context_parallel_size": 2}),
        ("gemma3_text", {"decode_context_parallel_size": 2, "tensor_parallel_size": 8}),
        ("gemma3n_text", {"pipeline_parallel_size": 2}),
        ("nemotron_h", {"pipeline_parallel_size": 3}),
        ("llama", {"enable_expert_parallel": True}),
        ("kimi_linear", {"kda_prefill_backend": "flashkda", "device": "a100"}),
        ("mistral", {"max_num_batched_tokens": 100, "max_num_seqs": 101}),
        ("jamba", {"enable_chunked_prefill": False}),
    ],
)
def test_options_that_vllm_refuses(model: str, changed: dict[str, Any]) -> None:
    with pytest.raises(HKVError) as refused:
        plan_config(config(model), dataclasses.replace(OPTIONS, **changed))
    assert refused.value.argument.lstrip("-").replace("-", "_") in {*changed, "kv_dtype", "pipeline_parallel"}


@pytest.mark.parametrize(
    ("name", "changed", "checkpoints"),
    [
        ("qwen3-next-80b-a3b", {}, {0, 1}),
        ("qwen3-next-80b-a3b", {"gdn_prefill_backend": "triton"}, {0}),
        ("qwen3-next-80b-a3b", {"gdn_prefill_backend": "cutedsl", "device": "b200"}, {0}),
        ("qwen3-next-80b-a3b", {"device": "rtx-pro-6000"}, {0, 1}),
        ("qwen3-next-80b-a3b", {"device": "a100"}, {0}),
        ("kimi-k3", {}, {0, 1}),
        ("kimi-k3", {"kda_prefill_backend": "triton"}, {0}),
        ("kimi-k3", {"device": "l40s"}, {0}),
        ("kimi-linear-48b-a3b", {}, {0}),
    ],
)
def test_kernels_for_prompts_decide_states_inside_chunks(
    name: str, changed: dict[str, Any], checkpoints: set[int]
) -> None:
    """FlashInfer's and FlashKDA's leave one, on the GPUs that they run on; so does no kernel for unbounded gates."""
    model = plan_config(name, dataclasses.replace(OPTIONS, max_model_len=4096, **changed)).model
    assert {kinds.layer(spec).checkpoint_blocks for spec in model.specs.values()} == checkpoints


def test_delta_nets_of_other_keys_have_no_kernel_on_blackwell() -> None:
    wide = config("qwen3_next") | {"linear_key_head_dim": 64}
    for device, checkpoints in (("h100", {0, 1}), ("b200", {0})):
        plan = plan_config(wide, dataclasses.replace(OPTIONS, device=device))
        assert {kinds.layer(spec).checkpoint_blocks for spec in plan.model.specs.values()} == checkpoints


def test_experts_are_dealt_out_where_there_are_some() -> None:
    options = dataclasses.replace(OPTIONS, enable_expert_parallel=True, tensor_parallel_size=8)
    for name in ("gpt-oss-120b", "deepseek-v3", "qwen3-30b-a3b", "glm-4.5v"):
        split = dataclasses.replace(options, enable_expert_parallel=False)
        assert plan_config(name, options).startup == plan_config(name, split).startup


def test_memory_from_its_parts() -> None:
    """The share of the GPU that vLLM takes, less weights and the rest (`request_memory` rounds it up)."""
    parts = EngineOptions(gpu_memory=85_000_000_001, weights=16 << 30, activations=3 << 30, gpu_memory_utilization=0.9)
    plan = plan_config(config("llama"), parts)
    assert plan.settings.memory.stages[0] == 76_500_000_001 - (19 << 30)
    assert plan.settings.memory.origin == "computed"
    with pytest.raises(PlanError, match="--gpu-memory"):
        plan_config(config("llama"), dataclasses.replace(parts, weights=80 << 30))


def test_weights_are_computed_and_the_rest_is_a_range() -> None:
    """Each stage's own weights, less the most and the least that else is taken."""
    parts = EngineOptions(gpu_memory=79 << 30, pipeline_parallel_size=2, tensor_parallel_size=2)
    memory = plan_config("llama-3.1-8b", parts).settings.memory
    [rest], weights = memory.parts["activations"], memory.parts["weights"]
    assert [part.most for part in weights] == [4015259648, 4015267840]
    assert memory.stages == tuple(memory.taken - part.most - rest.most for part in weights)
    assert memory.most == tuple(memory.taken - part.most - rest.least for part in weights)
    assert rest.least < rest.most
    assert (weights[0].origin, rest.origin, memory.origin) == ("computed", "estimated", "estimated")


def test_large_rotary_tables_are_counted_by_themselves() -> None:
    """Scout's have a row for each of 10 Mi positions, of 128 elements; those of Llama 3.1 are in the estimate."""
    parts = EngineOptions(gpu_memory=79 << 30, tensor_parallel_size=8, max_model_len=32768)
    memory = plan_config("llama-4-scout", parts).settings.memory
    [tables], [weights], [rest] = (memory.parts[name] for name in ("tables", "weights", "activations"))
    assert tables.most == 10 * 2**20 * 128 * 2
    assert memory.stages == (memory.taken - weights.most - tables.most - rest.most,)
    assert "tables" not in plan_config("llama-3.1-8b", parts).settings.memory.parts
    known = dataclasses.replace(parts, weights=30 << 30)
    assert "tables" not in plan_config("llama-4-scout", known).settings.memory.parts


@pytest.mark.parametrize(
    ("name", "unpacked"), [("llama-3.3-70b", "bfloat16"), ("llama-3.1-70b", ""), ("minimax-m2.1", "")]
)
def test_weights_from_a_part_of_a_config_say_in_which_type(name: str, unpacked: str) -> None:
    """A shipped excerpt may lack `quantization_config`; a whole file and one that has it do not."""
    parts = EngineOptions(gpu_memory=79 << 30, tensor_parallel_size=8, max_model_len=8192)
    assert plan_config(name, parts).settings.memory.unpacked == unpacked


def test_a_gpu_that_is_named_has_the_memory_that_such_cards_report() -> None:
    command = ["plan", "llama-3.1-8b", "--max-model-len", "4k", "--gpu"]
    named, said = (
        CliRunner().invoke(cli, [*command, *gpu]) for gpu in (["h800"], ["h800", "--gpu-memory", "81008MiB"])
    )
    assert named.exit_code == 0, named.exception
    blocks = [re.search(r"([\d,]+) blocks", found.output) for found in (named, said)]
    assert all(blocks)
    assert len({found.group(1) for found in blocks if found}) == 1
    unknown = CliRunner().invoke(cli, [*command, "h900"])
    assert isinstance(unknown.exception, ConfigError)
    assert "h800" in unknown.exception.expected


def test_weights_that_do_not_fit_are_refused() -> None:
    parts = EngineOptions(gpu_memory=int(79.11 * 2**30))
    with pytest.raises(PlanError, match=r"131\.42 GiB of weights"):
        plan_config("llama-3.1-70b", parts)
    assert plan_config("llama-3.1-70b", dataclasses.replace(parts, tensor_parallel_size=8)).requests > 0


def test_weights_from_an_index(tmp_path: pathlib.Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"metadata": {"total_size": 1001}, "weight_map": {}}')
    assert size_of_weights(str(index), 4) == 251
    assert size_of_weights("2GiB", 4) == 2 << 30
    for text in ("{}", "[]", '{"metadata": 3}', "[" * 200_000 + "]" * 200_000, "{", "\xff"):
        index.write_bytes(text.encode("latin-1"))
        with pytest.raises(HKVError, match=r"total_size|nested too deeply|as --weights names it"):
            size_of_weights(str(index), 4)
    with pytest.raises(HKVError, match=r"nested|JSON object"):
        parse_speculation("[" * 200_000 + "]" * 200_000)


def test_a_window_longer_than_the_request_is_capped() -> None:
    """Bytes of a sequence: no more of a window than the request has tokens."""
    short = plan_config(config("mistral"), dataclasses.replace(OPTIONS, max_model_len=1000))
    assert short.sequence_bytes == 1000 * 32 * 8 * 256 * 2
    assert plan_config(config("mistral"), OPTIONS).sequence_bytes == 4096 * 32 * 8 * 256 * 2


def test_programs_and_options_lead_to_the_same() -> None:
    model = hkv.read_model(config("mistral"))
    assert hkv.plan(model, 80 << 30).startup == plan_config(config("mistral"), OPTIONS).startup
    assert hkv.plan(model, options=OPTIONS, max_model_len=8192).max_model_len == 8192


def test_speculative_configs() -> None:
    asked = '{"model": "x/y-eagle3-z", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}'
    with pytest.raises(ConfigError, match="draft_tensor_parallel_size"):
        parse_speculation(asked)
    assert parse_speculation('{"model": "ngram", "num_speculative_tokens": 3}').method == "ngram"
    assert parse_speculation('{"model": "x/y-eagle3-z", "num_speculative_tokens": 3}').method == "eagle3"
    eagle = parse_speculation('{"method": "eagle", "model": "d", "num_speculative_tokens": 3}')
    assert (eagle.drops_block, eagle.prefill_lookahead(1)) == (True, 1)
    assert Speculation(method="mtp", num_speculative_tokens=3).prefill_lookahead(2) == 3


@pytest.mark.vllm
def test_starts_as_the_installed_vllm_does() -> None:
    """Cases that are in no record: all models under defaults, and five sets of layers under random options."""
    command = [sys.executable, "benchmarks/compare_startup.py", "--cases", "73", "--first", "900"]
    done = subprocess.run(command, cwd=DATA.parent.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "planned by vLLM" in done.stdout


RELEASED = records_by_model(DATA / "planning" / "released_startup.jsonl.gz")
"""Starts of vLLM 0.33.0 that `benchmarks/compare_startup.py --released --record` wrote."""


@pytest.mark.parametrize("model", RELEASED)
def test_a_released_model_starts_as_vllm_starts_it(model: str) -> None:
    assert_starts_agree(load_config(model), RELEASED[model])


def test_the_records_of_released_models_are_worth_it() -> None:
    """Most released models are there, one-byte caches and refusals among the answers, and GPUs of each generation."""
    starts = [record for each in RELEASED.values() for record in each]
    assert len(RELEASED) > 120
    assert {"fp8", "fp8_e5m2", "int8_per_token_head"} <= {start["options"].get("kv_cache_dtype") for start in starts}
    assert {"h100", "a100", "l40s"} <= {start["device"] for start in starts}
    assert 0 < sum("refused" in start["vllm"] for start in starts) < len(starts) // 2


@pytest.mark.parametrize("name", DEVICES)
def test_a_gpu_goes_by_its_drivers_name_and_as_people_write_it(name: str) -> None:
    device = DEVICES[name]
    for asked in (device.driver_name, name.upper(), name.replace("-", " "), *device.also.split()):
        assert device_of(asked) is device
    assert 0.9 * device.memory_gib < device.reported <= device.memory_gib


CARDS = """
RTX 3090, geforce rtx 3090, rtx_3090, 3090, NVIDIA GeForce RTX 3090, rtx a6000, RTX 6000 Ada, A30, H800-80GB, gb200
B300, GH200 480GB, NVIDIA GB300, h100 nvl
"""


@pytest.mark.parametrize("asked", re.split(", |\n", CARDS.strip()))
def test_a_model_is_planned_on_a_card_that_people_have(asked: str) -> None:
    plan = plan_config(
        "llama-3.2-3b", EngineOptions(device=asked, gpu_memory=reported_memory(asked), max_model_len=4096)
    )
    assert plan.served.plan.num_blocks > 1000


@pytest.mark.parametrize(
    ("model", "gpu", "length", "said"),
    [
        ("QwQ-32B", "h100", 32000, "with the most it fits"),
        ("QwQ-32B", "h100", 40960, "with the most it fits"),
        ("qwen3-32b", "h100", 40960, "with the most it fits"),
        ("llama-3.1-8b", "l4", 131072, "with the most it does not fit either"),
    ],
)
def test_a_refusal_at_the_least_of_an_estimate_names_its_range(model: str, gpu: str, length: int, said: str) -> None:
    memory = reported_memory(gpu)
    options = EngineOptions(device=gpu, gpu_memory=memory, gpu_memory_reported=True, max_model_len=length)
    with pytest.raises(PlanError, match=f"estimated as .* to .*, this is for the least, and {said}"):
        plan_config(model, options)

"""Drafts beside their targets, as vLLM's own draft classes cache them (`benchmarks/draft_classes.py`)."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.draft_classes import DATA, draft_cases
from hkv.cli import cli
from hkv.cli.plan import PLANNED
from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.planning.engine_options import EngineOptions
from hkv.dialects.vllm.planning.engine_plan import plan_config, read_models
from hkv.dialects.vllm.planning.speculation import chained, speculation_of
from hkv.errors import ConfigError
from hkv.spec import LayerSpec, MLAAttention

CASES = draft_cases()
LINES = (DATA / "drafts.jsonl").read_text(encoding="utf-8").splitlines()
ANSWERS = {each["name"]: each["answer"] for each in map(json.loads, LINES)}


def read(name: str, **options: Any) -> tuple[Any, Any]:
    case = CASES[name]
    asked = {**case["speculative_config"], **({"model": "its config"} if "draft" in case else {})}
    speculation = speculation_of(asked)
    given = EngineOptions(kv_cache_memory_bytes=64 << 30, speculation=speculation, **options)
    return given, read_models(case["config"], given, case.get("draft"))[1]


def described(spec: LayerSpec) -> tuple[Any, ...]:
    """A layer's cache without what the target's blocks decide."""
    record = {name: getattr(spec, name, None) for name in ("num_kv_heads", "head_size", "window")}
    return (kinds.layer(spec).vllm_name, *record.values())


def recorded(layer: dict[str, Any]) -> tuple[Any, ...]:
    return (layer["kind"], layer["num_kv_heads"], layer["head_size"], layer.get("sliding_window"))


def test_every_case_is_answered() -> None:
    assert CASES.keys() == ANSWERS.keys()
    refused = {name for name, answer in ANSWERS.items() if "refused" in answer}
    assert refused == {"kimi-k2", "kimi-k3", "minimax-m2"}


@pytest.mark.parametrize("name", CASES)
def test_a_draft_caches_what_its_class_in_vllm_does(name: str) -> None:
    answer = ANSWERS[name]
    if "refused" in answer:
        with pytest.raises(ConfigError, match="method mtp"):
            read(name)
        return
    options, draft = read(name)
    found = collections.Counter(described(spec) for spec in draft.specs.values())
    assert found == collections.Counter(map(recorded, answer["layers"]))
    assert options.speculation.method == answer["method"]
    assert options.speculation.drops_block == answer["drops_block"]
    assert options.speculation.on_v1_runner != answer["v2_runner"]
    assert options.speculation.prefill_lookahead(chained(CASES[name]["config"], draft)) == answer["prefill_lookahead"]


def test_fields_of_the_draft_alone_are_ignored_there_although_the_target_decides_by_them() -> None:
    """`max_window_layers` decides nothing of a Llama draft; a field that both decide by is refused."""
    _, plain = read("eagle3 of SpecForge")
    for names in (("max_window_layers",), ("use_sliding_window", "max_window_layers")):
        _, draft = read("eagle3 of SpecForge", ignore_fields=names)
        assert draft.specs == plain.specs
    with pytest.raises(ConfigError, match="ignore_fields = 'hidden_size'"):
        read("eagle3 of SpecForge", ignore_fields=("hidden_size",))


def test_dspark_without_a_draft_is_the_targets_own() -> None:
    """Only DeepSeek-V4 has such layers in its checkpoint; how many is a field of its config."""
    options = EngineOptions(
        kv_cache_memory_bytes=64 << 30, speculation=speculation_of({"method": "dspark", "num_speculative_tokens": 5})
    )
    with pytest.raises(ConfigError, match=r"a model of type deepseek_v4 with method dspark; .*--draft CONFIG"):
        read_models(CASES["dspark of SpecForge"]["config"], options)
    target = CASES["dspark of DeepSeek-V4, 2 layers"]["config"]
    with pytest.raises(ConfigError, match="n_mtp_layers = -1: expected 1 or more DSpark layers"):
        read_models({**target, "n_mtp_layers": -1}, options)
    from_file = read_models(target, options, target)[1]
    assert from_file is not None
    assert len(from_file.specs) == 2


def test_openpangu_caches_a_latent_a_layer_and_drafts_with_one() -> None:
    """The sizes of openPangu Ultra MoE 718B; vLLM 0.33's `PanguUltraMoEForCausalLM` makes such layers of them."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_nextn_predict_layers": 1, "sandwich_norm": True}
    config = {"model_type": "pangu_ultra_moe", "num_hidden_layers": 61, "dtype": "bfloat16", **sizes}
    drafting = speculation_of({"method": "mtp", "num_speculative_tokens": 1})
    model, draft = read_models(config, EngineOptions(kv_cache_memory_bytes=64 << 30, speculation=drafting))
    assert draft is not None
    assert [described(spec) for spec in model.specs.values()] == [("MLAAttentionSpec", 1, 576, None)] * 61
    assert [described(spec) for spec in draft.specs.values()] == [("MLAAttentionSpec", 1, 576, None)]
    plain = plan_config(config, EngineOptions(kv_cache_memory_bytes=80 << 30)).served.plan
    assert plain.num_blocks == 76398  # as vLLM 0.33 itself starts
    with pytest.raises(ConfigError, match="kv_lora_rank"):
        read_models({**config, "kv_lora_rank": None}, EngineOptions(kv_cache_memory_bytes=64 << 30))


def test_dots3_note_is_planned_as_its_class_in_vllm_is() -> None:
    """Windows, and an indexer beside latents as large as theirs: what vLLM 0.33's language model starts with."""
    config = CASES["dots3_note"]["config"]
    options = EngineOptions(kv_cache_memory_bytes=80 << 30)
    plan = plan_config(config, options).served.plan
    assert plan.num_blocks == 36282
    assert [len(group.names) for group in plan.groups] == [26, 17, 16]
    assert {described(spec) for group in plan.groups for spec in group.specs} == {
        ("MLAAttentionSpec", 1, 1088, None),
        ("MLAAttentionSpec", 1, 132, None),
        ("SlidingWindowMLASpec", 1, 1088, 513),
    }
    for change, told in (
        ({"swa_kv_lora_rank": 256}, "no larger latents than those of layers with a window"),
        ({"sliding_window_size": None}, "sliding_window_size"),
        ({"layer_types": None}, "layer_types"),
    ):
        with pytest.raises(ConfigError, match=told):
            read_models({**config, **change}, options)
    for change, told in (({"kv_cache_dtype": "fp8"}, "auto for dots3_note"), ({"device": "b200"}, "a Hopper GPU")):
        with pytest.raises(ConfigError, match=told):
            read_models(config, dataclasses.replace(options, **change))
    drafting = dataclasses.replace(options, speculation=speculation_of({"method": "mtp", "num_speculative_tokens": 2}))
    with pytest.raises(ConfigError, match=r"mtp_layer_types.*1 entries, one an MTP layer"):
        read_models({**config, "mtp_layer_types": ["full_attention"] * 2}, drafting)
    _, full = read_models({**config, "mtp_layer_types": ["full_attention"]}, drafting)
    assert full is not None
    assert [spec.head_size for spec in full.specs.values() if isinstance(spec, MLAAttention)] == [1088, 132]


def test_methods_that_vllm_does_not_have_name_its_own() -> None:
    with pytest.raises(ConfigError, match="eagle3 with parallel_drafting"):
        speculation_of({"method": "peagle", "model": "d", "num_speculative_tokens": 4})
    for name, method in (("z-lab/Qwen3-8B-DFlash-b16", "dflash"), ("deepseek-ai/dspark_qwen3_8b_block7", "dspark")):
        assert speculation_of({"model": name, "num_speculative_tokens": 7}).method == method


def test_fields_of_the_draft_alone_are_ignored_in_the_plan_of_every_dialect(tmp_path: pathlib.Path) -> None:
    draft = tmp_path / "config.json"
    draft.write_text(json.dumps(CASES["eagle3 of SpecForge"]["draft"]))
    for dialect in PLANNED:
        command = f"plan qwen3-8b --memory 80GiB --dialect {dialect} --draft {draft} --ignore-field max_window_layers"
        found = CliRunner().invoke(cli, command.split())
        assert found.exit_code == 0, (dialect, found.exception)

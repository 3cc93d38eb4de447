"""Draft modules under RTP-LLM: whose groups they join, how their layers are numbered, what they cost."""

from __future__ import annotations

import json
import pathlib

import pytest

from hkv.dialects.rtp_llm.planning import PoolPlan, RtpOptions, plan_rtp_llm
from hkv.errors import PlanError
from hkv.model.huggingface import Model, ReadOptions, read_model

MODELS = pathlib.Path(__file__).resolve().parent.parent / "data" / "models"
GIB = 1 << 30


def model(name: str, block_size: int = 64, draft: bool = False, **changes: object) -> Model:
    fields = json.loads((MODELS / f"{name}.json").read_text()) | changes
    return read_model(fields, ReadOptions(block_size=block_size, draft=draft))


def layers(plan: PoolPlan) -> list[dict[str, list[int]]]:
    return [{group.tag: list(group.layers) for group in module} for module in plan.modules]


def test_modules_of_a_plain_model_cost_their_layers() -> None:
    draft = model("llama", draft=True, num_hidden_layers=1)
    alone = plan_rtp_llm(model("llama"), GIB * 20, RtpOptions())
    assert alone.modules == ()
    plan = plan_rtp_llm(model("llama"), GIB * 20, RtpOptions(modules=3), draft)
    assert plan.bytes_per_block * 32 == alone.bytes_per_block * 35
    assert plan.num_blocks == GIB * 20 // plan.bytes_per_block
    assert layers(plan) == [{"default": [32]}, {"default": [33]}, {"default": [34]}]
    assert plan.groups[0].layers == tuple(range(32))
    assert {group.num_blocks for module in plan.modules for group in module} == {plan.num_blocks}


def test_h23_a_sole_default_group_joins_the_hybrids_full_group() -> None:
    """The groups of a module are the target's; those of recurrent states stay empty."""
    full = {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}
    draft = model("qwen3_next", 1024, draft=True, **full)
    options = RtpOptions(block_size=1024, modules=2)
    plan = plan_rtp_llm(model("qwen3_next", 1024), GIB * 20, options, draft)
    empty: dict[str, list[int]] = {f"linear{index}": [] for index in range(3)}
    assert layers(plan) == [{"full": [48, 49]} | empty, {"full": [50, 51]} | empty]
    (group,) = [group for group in plan.modules[0] if group.layers]
    assert group.stride == plan.groups[0].stride == 1024 * 2 * 2 * 256 * 2
    assert plan.bytes_per_block == (12 + 2 * 2) * group.stride


def test_a_draft_of_typed_pools_joins_by_tag() -> None:
    draft = model("deepseek_v4", 256, draft=True, num_hidden_layers=1, layer_types=["sliding_attention"])
    options = RtpOptions(block_size=256, pools="independent", drafts=2, modules=2)
    alone = plan_rtp_llm(model("deepseek_v4", 256), GIB * 40, options)
    plan = plan_rtp_llm(model("deepseek_v4", 256), GIB * 40, options, draft)
    assert [{tag: ids for tag, ids in module.items() if ids} for module in layers(plan)] == [
        {"swa_kv": [43]},
        {"swa_kv": [44]},
    ]
    window = next(group for group in alone.groups if group.tag == "swa_kv")
    assert plan.tail_bytes_per_block == alone.tail_bytes_per_block + 2 * window.stride
    assert (plan.bytes_per_block, plan.reserve_bytes) == (alone.bytes_per_block, alone.reserve_bytes)


def refused(target: str, options: RtpOptions, draft: str, kinds: list[str] | None, says: str) -> None:
    changes = {"num_hidden_layers": len(kinds or "1")} | ({} if kinds is None else {"layer_types": kinds})
    module = model(draft, options.block_size, draft=True, **changes)
    with pytest.raises(PlanError, match=says):
        plan_rtp_llm(model(target, options.block_size), GIB * 40, options, module)


def test_h25_other_heads() -> None:
    refused("qwen3_next", RtpOptions(block_size=1024), "llama", None, "the same blocks and policy, among full, lin")


def test_a_draft_of_states_has_no_default_group() -> None:
    kinds = ["linear_attention", "full_attention"]
    refused("llama", RtpOptions(block_size=1024), "qwen3_next", kinds, "a group of the target's: default")


@pytest.mark.parametrize(
    ("kinds", "says"), [([], "43, as places in the group"), (["sliding_attention"], "all 2 of the draft")]
)
def test_groups_of_a_draft_have_all_its_layers_and_places_in_the_pool(kinds: list[str], says: str) -> None:
    options = RtpOptions(block_size=256, pools="independent")
    refused("deepseek_v4", options, "deepseek_v4", [*kinds, "heavily_compressed_attention"], says)


def test_no_module_is_no_number_of_modules() -> None:
    with pytest.raises(PlanError, match="from 1 to"):
        RtpOptions(modules=0)

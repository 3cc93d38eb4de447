"""Models planned by RTP-LLM's rules, and their caches run: DeepSeek-V4 from plan to fork, and others."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

from hkv.dialects.rtp_llm.addresses import Addresses
from hkv.dialects.rtp_llm.config import HYBRID, HYBRID_POOL, SINGLE
from hkv.dialects.rtp_llm.planned_cache import config_of_plan
from hkv.dialects.rtp_llm.planning import PoolPlan, RtpOptions, plan_rtp_llm
from hkv.model.huggingface import ReadOptions, load_config, read_model
from reference.dialects.rtp_llm.manager import Manager
from tests.rtp_llm.build import shape

MODELS = pathlib.Path(__file__).resolve().parent.parent / "data" / "models"


def planned(name: str, pools: str, block_size: int, num_blocks: int) -> PoolPlan:
    """A model's plan, its pools then cut to a size that a test can fill."""
    model = read_model(load_config(MODELS / f"{name}.json"), ReadOptions(block_size=block_size))
    plan = plan_rtp_llm(model, 40 << 30, RtpOptions(block_size=block_size, pools=pools))
    groups = tuple(dataclasses.replace(group, num_blocks=num_blocks) for group in plan.groups)
    return dataclasses.replace(plan, groups=groups, num_blocks=num_blocks)


@pytest.mark.parametrize(
    ("name", "pools", "block_size", "dialect"),
    [
        ("llama", "shared", 64, SINGLE),
        ("deepseek_v32", "shared", 64, SINGLE),
        ("qwen3_next", "shared", 1024, HYBRID),
        ("gemma3_text", "independent", 64, HYBRID_POOL),
        ("deepseek_v4", "independent", 256, HYBRID_POOL),
    ],
)
def test_a_plan_becomes_a_cache(name: str, pools: str, block_size: int, dialect: str) -> None:
    plan = planned(name, pools, block_size, 30)
    config = config_of_plan(plan)
    assert config.name == dialect
    assert [group.spec.page_size_bytes for group in config.topology.groups] == [
        group.block.bytes if group.block.kind in ("mha", "mla", "linear") else group.stride for group in plan.groups
    ]
    manager = Manager(config)
    manager.request("r", list(range(3 * block_size + 1)))
    assert manager.malloc("r", device_cache=False).success
    manager.insert("r")
    manager.request("s", list(range(3 * block_size + 1)))
    if name != "gemma3_text":
        assert manager.malloc("s").reused == 3 * block_size


def test_deepseek_v4_plans_allocates_reuses_evicts_and_forks() -> None:
    plan = planned("deepseek_v4", "independent", 256, 12)
    config = config_of_plan(plan, prefix_tree=True, independent_eviction=True)
    manager = Manager(config)
    tags = config.topology.tags
    assert len(tags) == 7

    prompt = [7] * (5 * 256 + 9)
    manager.request("first", prompt)
    assert manager.malloc("first").reused == 0
    rows = dict(zip(tags, manager.rows("first")[0], strict=True))
    assert {tag: shape(row) for tag, row in rows.items()} == {
        tag: ".....x" if tag == "hca_state" else "xxxxxx" for tag in tags
    }
    manager.insert("first")
    manager.free("first")

    manager.request("second", prompt)
    assert manager.malloc("second").reused == 5 * 256
    again = dict(zip(tags, manager.rows("second")[0], strict=True))
    assert again["csa_kv"][:5] == rows["csa_kv"][:5]
    assert shape(again["swa_kv"]) == "....xx"
    assert again["swa_kv"][4] == rows["swa_kv"][4]

    pairs = manager.fork("second", [0, 0])
    assert pairs is not None
    assert [pair.tag for pair in pairs] == list(tags)
    layer = plan.groups[tags.index("csa_kv")].layers[0]
    addresses = Addresses(plan)
    for pair in pairs:
        assert all(old.size == new.size for old, new in addresses.copies(pair.source, pair.target, pair.tag))
    assert addresses.address(layer, 3, "csa_kv") != addresses.address(layer, 4, "csa_kv")

    manager.free("second")
    cached = manager.allocator.cache_refs
    assert cached == 6 * 5
    manager.request("third", [8] * (8 * 256))
    assert manager.malloc("third").success
    assert manager.allocator.cache_refs < cached
    manager.free("third")
    manager.evict(1000)
    assert manager.allocator.free_blocks == manager.allocator.total

"""Configurations under RTP-LLM's rules: which allocator they mean, and which are refused."""

from __future__ import annotations

import pytest

from hkv.dialects.rtp_llm.config import HYBRID, HYBRID_POOL, SINGLE, RtpConfig, reserve_for_ratio
from hkv.errors import ConfigError
from hkv.model.group_policy import EvictPolicy
from hkv.model.topology import Topology
from reference.dialects.rtp_llm.allocator import KINDS
from reference.dialects.rtp_llm.manager import ALLOCATORS
from reference.dialects.rtp_llm.single import SingleAllocator
from tests.rtp_llm.build import FULL, LINEAR, SWA, dsv4_allocator, group, single, tiny_hybrid, tiny_multi


def test_the_topology_decides_the_allocator() -> None:
    names = [of.config.name for of in (single(), tiny_hybrid(), tiny_multi(4, 4), dsv4_allocator())]
    assert names == [SINGLE, HYBRID, HYBRID_POOL, HYBRID_POOL]
    assert list(ALLOCATORS) == names[:3]
    assert {group_type.name for group_type in KINDS} == {"FULL", "LINEAR", "SWA"}
    with pytest.raises(ConfigError, match="one full-attention group"):
        SingleAllocator(tiny_hybrid().config)


def test_linear_groups_alone_have_no_allocator() -> None:
    linear = Topology((group("linear", LINEAR, 4),))
    with pytest.raises(ConfigError, match="a full-attention group, or independent pools"):
        RtpConfig(topology=linear, num_blocks=(9,))


def test_blocks_of_keys() -> None:
    assert tiny_hybrid().config.block_size == 4
    full = group("full", FULL, 4)
    with pytest.raises(ConfigError, match="a block for each cache key"):
        RtpConfig(topology=Topology((full, group("linear", LINEAR, 8))), num_blocks=(9,))
    window = group("swa", SWA, 4)
    with pytest.raises(ConfigError, match="tokens of all ranks"):
        RtpConfig(topology=Topology((full, window)), num_blocks=(9,), cp_size=2)
    with pytest.raises(ConfigError, match="tokens of all ranks"):
        RtpConfig(topology=Topology((full, window)), num_blocks=(9,), prefill_cp_size=2)
    wide = Topology((full, group("swa", SWA, 8)))
    assert RtpConfig(topology=wide, num_blocks=(9,), prefill_cp_size=2).block_size == 4
    with pytest.raises(ConfigError, match="own ranks share a sequence"):
        RtpConfig(topology=wide, num_blocks=(9,), cp_size=2, prefill_cp_size=2)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_blocks", (9, 9), "one number a pool"),
        ("num_blocks", 9, "one number a pool"),
        ("num_blocks", (1,), "from 2 to"),
        ("linear_step", -1, "from 0 to"),
        ("reserve_blocks", 1.5, "from 0 to"),
        ("cp_size", 0, "from 1 to"),
        ("cp_rank", 1, "a rank"),
        ("prefill_cp_size", 0, "from 1 to"),
        ("bugs", frozenset({"no-such-bug"}), "names of"),
    ],
)
def test_impossible_numbers(field: str, value: object, message: str) -> None:
    fields = {"topology": Topology((group("full", FULL, 4),)), "num_blocks": (9,), field: value}
    with pytest.raises(ConfigError, match=message):
        RtpConfig(**fields)


def test_groups_that_lose_blocks_alone() -> None:
    window = group("swa", SWA, 4, evict_policy=EvictPolicy.INDEPENDENT)
    topology = Topology((group("full", FULL, 4), window))
    assert RtpConfig(topology=topology, num_blocks=(9,)).independent_groups == frozenset()
    config = RtpConfig(topology=topology, num_blocks=(9,), independent_eviction=True)
    assert config.independent_groups == {1}


def test_a_reserve_is_rounded_down() -> None:
    assert (reserve_for_ratio(5, 99), reserve_for_ratio(5, 100)) == (4, 5)

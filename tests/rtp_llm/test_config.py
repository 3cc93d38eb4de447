"""Configurations under RTP-LLM's rules: the allocator that they mean, refusals, capacities, figures for operators."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.contract.traffic import RandomChoices
from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm.config import HYBRID, HYBRID_POOL, NAMES, SINGLE, RtpConfig, reserve_for_ratio
from hkv.dialects.rtp_llm.engines.numpy import RtpNumpyEngine
from hkv.dialects.rtp_llm.log import to_rtp_config
from hkv.dialects.rtp_llm.monitoring import cache_info, pool_snapshots, recent_hits, token_capacity, tokens_of
from hkv.dialects.rtp_llm.plain import empty
from hkv.dialects.rtp_llm.traffic import draw_rtp_header, drive_rtp, rtp_features
from hkv.errors import ConfigError
from hkv.model.group_policy import CpMapping, EvictPolicy
from hkv.model.topology import Topology
from reference.dialects.rtp_llm.cache import key_at, whole_keys
from reference.dialects.rtp_llm.lists import effective
from reference.dialects.rtp_llm.pools import available
from reference.dialects.rtp_llm.records import Pool
from tests.rtp_llm.build import FULL, LINEAR, SWA, dsv4_allocator, group, single, tiny_hybrid, tiny_multi
from tests.rtp_llm.traffic import draw_config
from tests.rtp_llm.witness.allocator import KINDS
from tests.rtp_llm.witness.manager import ALLOCATORS
from tests.rtp_llm.witness.single import SingleAllocator


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


# Capacities against the witness, and ranks against the slot mapper.


def test_counts_that_are_not_one_a_pool_are_refused() -> None:
    with pytest.raises(ConfigError, match="one number for each of 2 pools"):
        tokens_of(tiny_multi(6, 8).config, [5])


@settings(max_examples=60)
@given(rng=st.randoms(use_true_random=False))
def test_capacities_are_the_references(rng: random.Random) -> None:
    config = draw_config(rng)
    allocator = ALLOCATORS[config.name](config)
    for pool in allocator.pools:
        pool.malloc(rng.randint(0, pool.total))
    free = [pool.free for pool in allocator.pools]
    assert tokens_of(config, free) == allocator.tokens_of("free_blocks")
    assert tokens_of(config, [pool.total for pool in allocator.pools]) == allocator.tokens_of("total")
    for count in ("total", "available"):
        blocks = [getattr(pool, count) for pool in allocator.pools]
        assert token_capacity(config, blocks) == allocator.token_capacity(count)


@settings(max_examples=50)
@given(size=st.integers(1, 300), ranks=st.integers(2, 9), dealt=st.booleans(), tokens=st.integers(0, 999))
def test_the_text_maps_tokens_and_keys_as_the_slot_mapper_does(size: int, ranks: int, dealt: bool, tokens: int) -> None:
    mapping = CpMapping.BLOCK_ROUND_ROBIN if dealt else CpMapping.NONE
    topology = Topology((group("full", FULL, size, cp_mapping=mapping), group("other", FULL, size)))
    config = RtpConfig(topology=topology, num_blocks=(9,), cp_size=ranks)
    cache = empty(config, keys=100, slots=1, batch=1, row=100)
    assert effective(cache, cache.groups[1], tokens) == config.mapper.effective_tokens(tokens, mapping)
    row = cache.vacant
    row.keys[:], row.count = cache.keys[2:102], 100
    whole = [key_at(cache, row, place, 1) for place in range(whole_keys(cache, row, 1))]
    assert whole == config.mapper.canonical_keys(row.keys)


# Figures for operators: pools and keys against the allocator's own counters.


@pytest.mark.parametrize("dialect", NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_snapshots_are_the_pools_own_counters(dialect: str, seed: int) -> None:
    choices = RandomChoices(seed)
    header = draw_rtp_header(choices, rtp_features(dialect)[seed % len(rtp_features(dialect))], dialect)
    engine, config = RtpNumpyEngine(header), to_rtp_config(header)
    seen = 0

    def perform(operation: structs.RtpOp) -> structs.RtpAnswer:
        nonlocal seen
        answer = engine.perform(operation)
        if isinstance(answer, structs.RtpState):
            pools = engine.cache.pools[1:]
            for snapshot, pool in zip(pool_snapshots(config, answer), pools, strict=True):
                assert snapshot.total == pool.total
                assert (snapshot.free, snapshot.available) == (pool.free, available(pool))
                blocks = engine.cache.blocks[pool.first + 1 : pool.first + 1 + pool.total]
                assert snapshot.not_in_use == sum(not block.request and not block.cache for block in blocks)
                assert 0 <= snapshot.used_percent <= 100
                seen += snapshot.request
            assert [snapshot.reserved for snapshot in pool_snapshots(config, answer)] == reserves(config, pools)
            info = cache_info(config, answer, [1, 2, 1])
            assert set(info.cached_keys) == {key for key, _ in answer.cached} | {1, 2}
            assert info.block_size == config.block_size * config.cp_size
            sizes = [group.spec.block_size if len(pools) > 1 else info.block_size for group in config.topology.groups]
            assert info.total_tokens == min(pool.total * size for pool, size in zip(pools, sizes, strict=False))
            assert info.available_tokens == min(
                available(pool) * size for pool, size in zip(pools, sizes, strict=False)
            )
            assert info.version == answer.version
        return answer

    drive_rtp(header, choices, perform, 25)
    assert seen


def reserves(config: RtpConfig, pools: Sequence[Pool]) -> list[int]:
    """Each pool's part of the reserve now (RTP-LLM `reserveBlocksForPool`)."""
    if config.name != HYBRID_POOL:
        return [config.reserve_blocks]
    fixed = [policy.explicit_block_num > 0 for policy in config.policies]
    whole = sum(available(pool) for pool, sized in zip(pools, fixed, strict=True) if not sized)
    return [
        0 if sized or not whole else config.reserve_blocks * available(pool) // whole
        for pool, sized in zip(pools, fixed, strict=True)
    ]


def idle(config: RtpConfig) -> structs.RtpState:
    """The state of a cache before its first request."""
    pools = [structs.PoolState(list(range(1, count)), {}, {}, {}) for count in config.num_blocks]
    return structs.RtpState(pools=pools, lists={}, cached=[], version=-1)


def test_routers_are_told_the_tokens_of_all_ranks() -> None:
    ranks = single(8, 1, cp_size=4).config
    info = cache_info(ranks, idle(ranks))
    assert (info.block_size, info.total_tokens, info.available_tokens) == (4, 28, 28)


def test_routers_are_told_blocks_of_keys_behind_a_sharded_prefill() -> None:
    """One pool's blocks count as keys do, though its first group's are those of all of the prefill's ranks."""
    groups = (group("swa", SWA, 8), group("full", FULL, 4))
    decode = RtpConfig(topology=Topology(groups), num_blocks=(9,), prefill_cp_size=2)
    info = cache_info(decode, idle(decode))
    assert (info.block_size, info.total_tokens, info.available_tokens) == (4, 32, 32)


def test_the_reserve_is_shared_by_blocks_available_now() -> None:
    config = dataclasses.replace(tiny_multi(9, 9).config, reserve_blocks=4)
    state = idle(config)
    assert [pool.reserved for pool in pool_snapshots(config, state)] == [2, 2]
    state.pools[0].request.update({str(block): 1 for block in range(1, 8)})
    assert [(pool.available, pool.reserved) for pool in pool_snapshots(config, state)] == [(1, 0), (8, 3)]


REQUESTS = st.lists(st.tuples(st.integers(0, 40), st.lists(st.integers(0, 6), max_size=5)), max_size=20)


@given(REQUESTS, st.integers(1, 60))
def test_recent_keys_are_those_of_a_plain_window(requests: list[tuple[int, list[int]]], window: int) -> None:
    timed = [(sum(wait for wait, _ in requests[: index + 1]), keys) for index, (_, keys) in enumerate(requests)]
    known, hits = [], 0
    for index, (now, keys) in enumerate(timed):
        known = [key for time, old in timed[:index] if now - time < window for key in old]
        hits += sum(key in known for key in keys)
        known += keys
    found = recent_hits(timed, window)
    assert (found.keys, found.hits) == (sum(len(keys) for _, keys in timed), hits)
    assert (found.retained, found.retained_unique) == (len(known), len(set(known)))


def test_rtp_llms_own_example() -> None:
    requests = [(0, [1, 2, 3]), (10, [2, 3, 4])]
    assert recent_hits(requests[:1], 1000).hit_ratio == 0.0
    second = recent_hits(requests, 1000)
    assert (second.keys, second.hits, second.retained, second.retained_unique) == (6, 2, 6, 4)
    assert recent_hits([*requests, (1010, [2, 3, 4])], 1000).hits == 2
    assert recent_hits([], 1000).hit_ratio == 0.0
    with pytest.raises(ConfigError, match="the time of the one before"):
        recent_hits([*requests, (9, [1])])
    with pytest.raises(ConfigError, match="positive number of milliseconds"):
        recent_hits(requests, 0)

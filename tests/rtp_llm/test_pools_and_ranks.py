"""RTP-LLM's conformance vectors for a pool a group and for context parallelism in allocation."""

from __future__ import annotations

import pytest

from hkv.dialects.rtp_llm.config import RtpConfig
from hkv.model.topology import Topology
from reference.dialects.rtp_llm.export import free_cached, pop_from_cache
from reference.dialects.rtp_llm.hybrid import HybridAllocator
from reference.dialects.rtp_llm.operation import MallocResult, Verdict
from reference.dialects.rtp_llm.resource import BatchResource, linear_dependencies
from tests.rtp_llm.build import (
    FLASH,
    allocator,
    attention,
    cache_blocks,
    counters,
    dsv4_allocator,
    dsv4_groups,
    group,
    grown,
    info,
    lists,
    shape,
    tiny_hybrid,
    tiny_multi,
)

N = -1
LINEAR, FULL = 0, 1


def test_sizes() -> None:
    pools = tiny_multi(6, 8)
    assert [pool.total for pool in pools.pools] == [5, 7]
    assert pools.total == 12
    assert {pools.tokens_of(count) for count in ("free_blocks", "available", "total")} == {28}
    assert pools.token_capacity == 20
    sharded = tiny_multi(6, 8, cp_size=2)
    assert {sharded.tokens_of(count) for count in ("free_blocks", "available", "total")} == {56}


def test_the_reserve_is_shared_out() -> None:
    pools = tiny_multi(20, 6, reserve_blocks=1, cp_size=2)
    request = info(pools, 32)
    assert pools.malloc(request).success
    assert len(lists(request.resource)[FULL]) == 4


def test_what_never_fits() -> None:
    pools = tiny_multi(3, 3)
    before = counters(pools)
    request = info(pools, 9, reuse=False, device_cache=False)
    assert pools.malloc(request) == MallocResult(0, Verdict.PERMANENT)
    assert (counters(pools), lists(request.resource)) == (before, [[], []])


def test_the_cache_outlives_a_refusal() -> None:
    pools = tiny_multi(4, 4, reserve_blocks=1000)
    cache_blocks(pools, {LINEAR: [100], FULL: [100]})
    assert not pools.malloc(info(pools, 8, keys=[100, 101])).success
    assert (pools.request_refs, pools.cache_refs) == (0, 2)


def test_both_lists_are_restored() -> None:
    pools = tiny_multi(4, 2)
    request = info(pools, 4)
    assert pools.malloc(request).success
    before, held = lists(request.resource), counters(pools)
    assert not pools.malloc(grown(request, 9)).success
    assert (lists(request.resource), counters(pools)) == (before, held)


def test_a_block_listed_twice_is_released_once() -> None:
    pools = tiny_multi(4, 4)
    (block,) = cache_blocks(pools, {FULL: [7]})[FULL].values()
    listed = BatchResource(pools.config)
    listed.rows[0].groups[FULL].assign([block, block, N])
    free_cached(pools, listed)
    assert (pools.cache_refs, pools.free_blocks) == (0, 6)


def test_deepseek_v4_on_two_ranks() -> None:
    pools = dsv4_allocator(cp_size=2, prefix_tree=True)
    keys = list(range(100, 111))
    first = info(pools, 43, keys=keys[:10], device_cache=False, cleanup=False)
    assert pools.malloc(first).success
    pools.insert(first.resource, 43)
    pools.free(first.resource)
    second = info(pools, 44, keys=keys)
    assert pools.malloc(second).reused == 4 * 4 * 2
    pools.free(second.resource)
    popped = pop_from_cache(pools, 4)
    assert popped is not None
    canonical = [101, 103, 105, 107, 109]
    assert popped.rows[0].keys == canonical
    assert popped.rows[0].dependencies == linear_dependencies(canonical)
    assert popped.rows[0].canonical
    assert pools.cache_refs > 0
    free_cached(pools, popped)
    assert (pools.cache_refs, pools.free_blocks) == (0, pools.total)


def test_deepseek_v4_decodes() -> None:
    pools = dsv4_allocator(FLASH)
    tags = pools.config.topology.tags
    request = info(pools, 16, reuse=False, device_cache=False, cleanup=False)
    assert pools.malloc(request).success
    for blocks in range(5, 8):
        free = pools.free_blocks
        assert pools.malloc(grown(request, 4 * blocks, cleanup=True)).success
        assert pools.free_blocks == free - 7 + 4
        for tag, ids in zip(tags, lists(request.resource), strict=True):
            tail = {"hca_state": 1, "csa_state": 2, "indexer_state": 2, "swa_kv": 2}.get(tag, blocks)
            assert shape(ids) == "." * (blocks - tail) + "x" * tail


@pytest.mark.parametrize("with_tails", [True, False])
def test_groups_without_reuse_have_no_vote(with_tails: bool) -> None:
    groups = dsv4_groups(FLASH, 4)
    config = RtpConfig(topology=Topology(groups), num_blocks=(100,))
    hybrid = HybridAllocator(config)
    cached = [
        index
        for index, each in enumerate(groups)
        if index in config.full_groups or (with_tails and each.policy.enable_prefix_reuse)
    ]
    assert len(cached) == (6 if with_tails else 3)
    cache_blocks(hybrid, {index: [100, 101] for index in cached})
    request = info(hybrid, 12, keys=[100, 101, 102])
    assert hybrid.malloc(request).reused == (8 if with_tails else 0)


def test_ranks_match_canonical_keys() -> None:
    hybrid = tiny_hybrid(cp_size=2)
    cache_blocks(hybrid, {LINEAR: [101], FULL: [101]})
    request = info(hybrid, 16, keys=[100, 101, 102, 103])
    assert hybrid.malloc(request).reused == 8
    assert len(lists(request.resource)[FULL]) == 2


def test_ranks_insert_canonical_keys() -> None:
    hybrid = tiny_hybrid(20, cp_size=2)
    request = info(hybrid, 16, keys=[100, 101, 102, 103], device_cache=False, cleanup=False)
    assert hybrid.malloc(request).success
    hybrid.insert(request.resource, 16)
    found = [key for key in (100, 101, 102, 103) if (item := hybrid.cache.peek(key)) and item.has(FULL)]
    assert found == [101]


def test_a_virtual_block_is_one_block_on_every_rank() -> None:
    pools = dsv4_allocator(cp_size=4)
    request = info(pools, 16)
    assert pools.malloc(request).success
    assert [len(ids) for ids in lists(request.resource)] == [1] * 7


def test_a_group_without_a_full_one_needs_pools_of_its_own() -> None:
    from hkv.dialects.rtp_llm.config import HYBRID_POOL
    from hkv.errors import ConfigError
    from tests.rtp_llm.build import SWA

    window = group("swa", SWA, 4)
    with pytest.raises(ConfigError, match="full-attention"):
        allocator(Topology((window,)), (10,))
    assert allocator(Topology((window,), pools="independent"), (10,)).config.name == HYBRID_POOL
    assert attention(4).block_size == 4

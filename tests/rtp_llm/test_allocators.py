"""RTP-LLM's conformance vectors for its allocators: one group, several, pools of their own, and ranks."""

from __future__ import annotations

import pytest

from hkv.dialects.rtp_llm.config import RtpConfig
from hkv.model.topology import Topology
from tests.rtp_llm.build import (
    FLASH,
    allocator,
    attention,
    cache_blocks,
    counters,
    dsv4_allocator,
    dsv4_groups,
    granted,
    group,
    grown,
    info,
    lists,
    resource,
    shape,
    single,
    tiny_hybrid,
    tiny_multi,
)
from tests.rtp_llm.witness.estimates import batch_peak
from tests.rtp_llm.witness.export import free_cached, hold, pop_from_cache
from tests.rtp_llm.witness.hybrid import HybridAllocator
from tests.rtp_llm.witness.operation import CopyPair, MallocInfo, MallocResult, MallocVerdict
from tests.rtp_llm.witness.resource import BatchResource, linear_dependencies


def test_a_batch_shares_whole_blocks() -> None:
    allocator = single(block_size=8)
    request = granted(allocator, 17, batch=3)
    assert [len(lists(request.resource, row)[0]) for row in range(3)] == [3, 3, 3]
    assert len({lists(request.resource, row)[0][0] for row in range(3)}) == 1
    assert allocator.free_blocks == 4


def test_the_reserve_counts_for_new_requests_only() -> None:
    allocator = single(block_size=1, reserve_blocks=2)
    before = counters(allocator)
    refused = info(allocator, 8)
    assert allocator.malloc(refused) == MallocResult(0, MallocVerdict.PERMANENT)
    assert (counters(allocator), lists(refused.resource)) == (before, [[]])
    request = granted(allocator, 7)
    assert allocator.malloc(grown(request, 9)).success
    assert allocator.free_blocks == 0


def test_resident_blocks_are_no_room() -> None:
    allocator = single(6)
    cache_blocks(allocator, {0: [900, 901, 902, 903]}, resident=True)
    request = info(allocator, 13, batch=2, keys=[1, 2, 3, 4])
    assert allocator.malloc(request) == MallocResult(0, MallocVerdict.INTERNAL_ERROR)
    assert (allocator.free_blocks, allocator.available) == (1, 5)
    assert [lists(request.resource, row) for row in range(2)] == [[[]], [[]]]


def test_a_failed_growth_is_taken_back() -> None:
    allocator = single(8)
    request = granted(allocator, 4, batch=3)
    assert not allocator.malloc(grown(request, 16)).success
    assert allocator.free_blocks == 6
    assert [lists(request.resource, row) for row in range(3)] == [[[1]], [[1]], [[1]]]


def test_the_verdict_is_given_before_blocks_go_back() -> None:
    allocator = single()
    granted(allocator, 24)
    request = info(allocator, 16)
    assert allocator.malloc(request) == MallocResult(0, MallocVerdict.RETRYABLE)
    assert (allocator.available, lists(request.resource)) == (3, [[]])


def test_peaks() -> None:
    allocator = single()
    fresh = resource(allocator)
    peaks = [batch_peak(allocator, fresh, seq=8, common=8, remaining=100, reserve=reserve) for reserve in (0, 3)]
    assert peaks == [27, 28]
    request = granted(allocator, 8)
    left = [(0, 0), (4, 0), (4, 4)]
    assert [
        batch_peak(allocator, request.resource, seq=8, common=8, remaining=remaining, reserve=reserve)
        for remaining, reserve in left
    ] == [0, 1, 2]


@pytest.mark.parametrize(
    ("seq", "remaining", "width", "peak"), [(9, 0, 2, 0), (9, 0, 4, 2), (9, 4, 2, 2), (9, 4, 4, 6), (12, 0, 4, 0)]
)
def test_peaks_of_a_batch(seq: int, remaining: int, width: int, peak: int) -> None:
    allocator = single(16)
    held = BatchResource(allocator.config, 2)
    for row, last in zip(held.rows, (3, 4), strict=True):
        row.groups[0].assign([1, 2, last])
    assert batch_peak(allocator, held, seq=seq, common=seq, remaining=remaining, target=width) == peak


def test_a_fork_takes_what_was_estimated() -> None:
    allocator = single(6)
    request = granted(allocator, 5)
    assert batch_peak(allocator, request.resource, seq=5, common=5, remaining=0, target=4) == 3
    pairs = allocator.update(request.resource, [0, 0, 0, 0], True)
    assert pairs is not None
    assert [(pair.source, pair.target) for pair in pairs] == [(2, 3), (2, 4), (2, 5)]
    assert (allocator.free_blocks, request.resource.batch) == (0, 4)
    assert lists(request.resource, 3) == [[1, 2]]


def test_nothing_is_held_for_no_keys() -> None:
    allocator = single()
    request = granted(allocator, 8, keys=[1, 2])
    assert hold(allocator, request.resource.rows[0], [], connector=False) is None


def test_a_policy_without_reuse() -> None:
    allocator = single(policy={"enable_prefix_reuse": False})
    cache_blocks(allocator, {0: [1, 2, 3, 4]})
    request = info(allocator, 16, keys=[1, 2, 3, 4])
    assert allocator.malloc(request) == MallocResult(0)
    version = allocator.cache.version
    request.resource.rows[0].set_keys([11, 12, 13, 14])
    allocator.insert(request.resource, 16)
    assert (allocator.cache.version, 11 in allocator.cache.items) == (version, False)


def test_context_parallelism_counts_tokens_only() -> None:
    allocator = single(block_size=8, cp_size=2)
    assert allocator.tokens_of("available") == 144
    assert allocator.single_need(resource(allocator), 65, 0) == 5


def test_keys_but_the_last_are_matched() -> None:
    allocator = single()
    cached = cache_blocks(allocator, {0: [1, 2, 3]})[0]
    request = info(allocator, 12, keys=[1, 2, 3])
    assert allocator.malloc(request) == MallocResult(8)
    assert lists(request.resource)[0][:2] == [cached[1], cached[2]]


def test_a_fork_that_fails_has_freed_what_nobody_goes_on_from() -> None:
    allocator = single(4)
    request = granted(allocator, 5, batch=2)
    assert lists(request.resource, 1) == [[1, 3]]
    assert allocator.update(request.resource, [0, 0, 0], True) is None
    assert [lists(request.resource, row) for row in range(2)] == [[[1, 2]], [[]]]
    assert allocator.free_blocks == 1


N = -1
LINEAR, FULL = 0, 1


def test_the_hit_ends_where_both_groups_have_a_block() -> None:
    allocator = tiny_hybrid()
    cached = cache_blocks(allocator, {FULL: [100, 101, 102], LINEAR: [101]})
    request = info(allocator, 12, keys=[100, 101, 102, 103], cleanup=False)
    assert allocator.malloc(request) == MallocResult(8)
    linear, full = lists(request.resource)
    assert full[:2] == [cached[FULL][100], cached[FULL][101]]
    assert linear[:2] == [N, cached[LINEAR][101]]
    assert (shape(linear), shape(full)) == (".xx", "xxx")
    assert request.resource.rows[0].device_reuse == 2


def test_an_inserted_prefix_is_reused_whole() -> None:
    allocator = tiny_hybrid()
    first = granted(allocator, 12, keys=[100, 101, 102], reuse=False, device_cache=False, cleanup=False)
    allocator.insert(first.resource, 12)
    allocator.free(first.resource)
    assert allocator.malloc(info(allocator, 16, keys=[100, 101, 102, 103])).reused == 12


def test_the_allocator_inserts_partly_filled_blocks_too() -> None:
    allocator = tiny_hybrid()
    first = granted(allocator, 10, keys=[100, 101, 102], reuse=False, device_cache=False, cleanup=False)
    allocator.insert(first.resource, 10)
    assert [shape(allocator.cache.match(key)) for key in (100, 101, 102)] == [".x", ".x", "xx"]


def forked(allocator, rows: list[tuple[int, int]]) -> MallocInfo:
    """A request of sequences with one block in each group."""
    request = MallocInfo(resource(allocator, len(rows)), info(allocator, 4, batch=len(rows)).tokens)
    for row, blocks in zip(request.resource.rows, rows, strict=True):
        for ids, block in zip(row.groups, blocks, strict=True):
            ids.assign([block])
    return request


def test_a_fork_without_blocks_changes_nothing() -> None:
    allocator = tiny_hybrid(4)
    request = forked(allocator, [tuple(allocator.pools[0].malloc(2))])
    before = counters(allocator)
    assert allocator.update(request.resource, [0, 0], True) is None
    assert (counters(allocator), lists(request.resource), allocator.free_blocks) == (before, [[1], [2]], 1)


def test_a_fork_copies_into_what_is_dropped() -> None:
    allocator = tiny_hybrid(5)
    b0, b1, b2, b3 = allocator.pools[0].malloc(4)
    request = forked(allocator, [(b0, b1), (b2, b3)])
    pairs = allocator.update(request.resource, [1, 1], True)
    assert pairs == [CopyPair("linear", b2, b0), CopyPair("full1", b3, b1)]
    assert [lists(request.resource, row) for row in range(2)] == [[[b0], [b1]], [[b2], [b3]]]
    assert allocator.free_blocks == 0
    allocator.free(request.resource)
    assert allocator.free_blocks == 4


def test_a_reused_tail_and_the_grid_before_it() -> None:
    allocator = tiny_hybrid(16)
    cached = cache_blocks(allocator, {FULL: [100, 101, 102], LINEAR: [100, 101, 102]})
    request = granted(allocator, 20, keys=[100, 101, 102, 103, 104], cleanup=False)
    linear = lists(request.resource)[LINEAR]
    assert shape(linear) == ".xxxx"
    assert linear[2] == cached[LINEAR][102]
    assert linear[1] not in cached[LINEAR].values()


def test_cleanup_leaves_full_groups_alone() -> None:
    allocator = tiny_hybrid(16)
    request = info(allocator, 24)
    for blocks in request.resource.rows[0].groups:
        blocks.assign(allocator.pools[0].malloc(6))
    assert allocator.malloc(request).success
    assert [shape(blocks) for blocks in lists(request.resource)] == [".x.xxx", "xxxxxx"]


@pytest.mark.parametrize(("remaining", "peak"), [(0, 10), (4, 12)])
def test_peak_with_a_longer_tail(remaining: int, peak: int) -> None:
    allocator = tiny_hybrid(30, tail=4)
    assert batch_peak(allocator, resource(allocator), seq=24, common=24, remaining=remaining) == peak


def test_a_batch_that_fits_exactly() -> None:
    allocator = tiny_hybrid(7)
    request = info(allocator, 5, batch=2, reuse=False, device_cache=False, cleanup=False)
    peaks = [
        batch_peak(allocator, request.resource, seq=5, common=4, remaining=remaining, target=2) for remaining in (0, 4)
    ]
    assert peaks == [6, 10]
    assert allocator.malloc(request).success
    assert allocator.free_blocks == 0


def test_the_estimate_is_what_decoding_takes() -> None:
    allocator = tiny_hybrid(28)
    request = granted(allocator, 8, cleanup=False)
    assert batch_peak(allocator, request.resource, seq=8, common=8, remaining=60, reuse=True) == 24
    least = allocator.free_blocks
    for seq in range(9, 69):
        assert allocator.malloc(grown(request, seq, cleanup=True)).success
        least = min(least, allocator.free_blocks)
    linear, full = lists(request.resource)
    assert (len([b for b in linear if b != N]), len(full), least) == (9, 17, 1)


def test_a_fork_without_copies_shares_every_block() -> None:
    allocator = tiny_hybrid()
    request = granted(allocator, 12, cleanup=False)
    before, free = lists(request.resource), allocator.free_blocks
    assert allocator.update(request.resource, [0, 0], False) == []
    assert [lists(request.resource, row) for row in range(2)] == [before, before]
    assert allocator.free_blocks == free
    allocator.free(request.resource)
    assert allocator.free_blocks == allocator.total


def test_a_hole_at_the_end_is_filled_without_a_copy() -> None:
    allocator = tiny_hybrid()
    request = info(allocator, 4, cleanup=False)
    linear, full = request.resource.rows[0].groups
    linear.assign([N])
    full.assign(allocator.pools[0].malloc(1))
    pairs = allocator.update(request.resource, [0, 0], True)
    assert pairs == [CopyPair("full1", 1, 3)]
    assert lists(request.resource, 0) == [[2], [3]]
    assert lists(request.resource, 1) == [[N], [1]]


def test_sizes() -> None:
    pools = tiny_multi(6, 8)
    assert [pool.total for pool in pools.pools] == [5, 7]
    assert pools.total == 12
    assert {pools.tokens_of(count) for count in ("free_blocks", "available", "total")} == {28}
    assert {pools.token_capacity(count) for count in ("available", "total")} == {20}
    sharded = tiny_multi(6, 8, cp_size=2)
    assert {sharded.tokens_of(count) for count in ("free_blocks", "available", "total")} == {56}


def test_the_reserve_is_shared_out() -> None:
    pools = tiny_multi(20, 6, reserve_blocks=1, cp_size=2)
    request = granted(pools, 32)
    assert len(lists(request.resource)[FULL]) == 4


def test_what_never_fits() -> None:
    pools = tiny_multi(3, 3)
    before = counters(pools)
    request = info(pools, 9, reuse=False, device_cache=False)
    assert pools.malloc(request) == MallocResult(0, MallocVerdict.PERMANENT)
    assert (counters(pools), lists(request.resource)) == (before, [[], []])


def test_the_cache_outlives_a_refusal() -> None:
    pools = tiny_multi(4, 4, reserve_blocks=1000)
    cache_blocks(pools, {LINEAR: [100], FULL: [100]})
    assert not pools.malloc(info(pools, 8, keys=[100, 101])).success
    assert (pools.request_refs, pools.cache_refs) == (0, 2)


def test_both_lists_are_restored() -> None:
    pools = tiny_multi(4, 2)
    request = granted(pools, 4)
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
    first = granted(pools, 43, keys=keys[:10], device_cache=False, cleanup=False)
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
    request = granted(pools, 16, reuse=False, device_cache=False, cleanup=False)
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
    request = granted(hybrid, 16, keys=[100, 101, 102, 103], device_cache=False, cleanup=False)
    hybrid.insert(request.resource, 16)
    found = [key for key in (100, 101, 102, 103) if (item := hybrid.cache.peek(key)) and item.has(FULL)]
    assert found == [101]


def test_a_virtual_block_is_one_block_on_every_rank() -> None:
    pools = dsv4_allocator(cp_size=4)
    request = granted(pools, 16)
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

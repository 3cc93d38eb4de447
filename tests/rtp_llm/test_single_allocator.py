"""RTP-LLM's conformance vectors for the allocator of one group."""

from __future__ import annotations

import pytest

from reference.dialects.rtp_llm.estimates import batch_peak
from reference.dialects.rtp_llm.export import hold
from reference.dialects.rtp_llm.operation import MallocResult, Verdict
from tests.rtp_llm.build import BatchResource, cache_blocks, counters, grown, info, lists, resource, single


def test_a_batch_shares_whole_blocks() -> None:
    allocator = single(block_size=8)
    request = info(allocator, 17, batch=3)
    assert allocator.malloc(request).success
    assert [len(lists(request.resource, row)[0]) for row in range(3)] == [3, 3, 3]
    assert len({lists(request.resource, row)[0][0] for row in range(3)}) == 1
    assert allocator.free_blocks == 4


def test_the_reserve_counts_for_new_requests_only() -> None:
    allocator = single(block_size=1, reserve_blocks=2)
    before = counters(allocator)
    refused = info(allocator, 8)
    assert allocator.malloc(refused) == MallocResult(0, Verdict.PERMANENT)
    assert (counters(allocator), lists(refused.resource)) == (before, [[]])
    request = info(allocator, 7)
    assert allocator.malloc(request).success
    assert allocator.malloc(grown(request, 9)).success
    assert allocator.free_blocks == 0


def test_resident_blocks_are_no_room() -> None:
    allocator = single(6)
    cache_blocks(allocator, {0: [900, 901, 902, 903]}, resident=True)
    request = info(allocator, 13, batch=2, keys=[1, 2, 3, 4])
    assert allocator.malloc(request) == MallocResult(0, Verdict.INTERNAL_ERROR)
    assert (allocator.free_blocks, allocator.available) == (1, 5)
    assert [lists(request.resource, row) for row in range(2)] == [[[]], [[]]]


def test_a_failed_growth_is_taken_back() -> None:
    allocator = single(8)
    request = info(allocator, 4, batch=3)
    assert allocator.malloc(request).success
    assert not allocator.malloc(grown(request, 16)).success
    assert allocator.free_blocks == 6
    assert [lists(request.resource, row) for row in range(3)] == [[[1]], [[1]], [[1]]]


def test_the_verdict_is_given_before_blocks_go_back() -> None:
    allocator = single()
    held = info(allocator, 24)
    assert allocator.malloc(held).success
    request = info(allocator, 16)
    assert allocator.malloc(request) == MallocResult(0, Verdict.RETRYABLE)
    assert (allocator.available, lists(request.resource)) == (3, [[]])


def test_peaks() -> None:
    allocator = single()
    fresh = resource(allocator)
    peaks = [batch_peak(allocator, fresh, seq=8, common=8, remaining=100, reserve=reserve) for reserve in (0, 3)]
    assert peaks == [27, 28]
    request = info(allocator, 8)
    assert allocator.malloc(request).success
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
    request = info(allocator, 5)
    assert allocator.malloc(request).success
    assert batch_peak(allocator, request.resource, seq=5, common=5, remaining=0, target=4) == 3
    pairs = allocator.update(request.resource, [0, 0, 0, 0], True)
    assert pairs is not None
    assert [(pair.source, pair.target) for pair in pairs] == [(2, 3), (2, 4), (2, 5)]
    assert (allocator.free_blocks, request.resource.batch) == (0, 4)
    assert lists(request.resource, 3) == [[1, 2]]


def test_nothing_is_held_for_no_keys() -> None:
    allocator = single()
    request = info(allocator, 8, keys=[1, 2])
    assert allocator.malloc(request).success
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
    request = info(allocator, 5, batch=2)
    assert allocator.malloc(request).success
    assert lists(request.resource, 1) == [[1, 3]]
    assert allocator.update(request.resource, [0, 0, 0], True) is None
    assert [lists(request.resource, row) for row in range(2)] == [[[1, 2]], [[]]]
    assert allocator.free_blocks == 1

"""RTP-LLM's conformance vectors for several groups over one pool."""

from __future__ import annotations

import pytest

from reference.dialects.rtp_llm.estimates import batch_peak
from reference.dialects.rtp_llm.operation import CopyPair, MallocInfo, MallocResult
from tests.rtp_llm.build import (
    cache_blocks,
    counters,
    grown,
    info,
    lists,
    resource,
    shape,
    tiny_hybrid,
)

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
    first = info(allocator, 12, keys=[100, 101, 102], reuse=False, device_cache=False, cleanup=False)
    assert allocator.malloc(first).success
    allocator.insert(first.resource, 12)
    allocator.free(first.resource)
    assert allocator.malloc(info(allocator, 16, keys=[100, 101, 102, 103])).reused == 12


def test_the_allocator_inserts_partly_filled_blocks_too() -> None:
    allocator = tiny_hybrid()
    first = info(allocator, 10, keys=[100, 101, 102], reuse=False, device_cache=False, cleanup=False)
    assert allocator.malloc(first).success
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
    request = info(allocator, 20, keys=[100, 101, 102, 103, 104], cleanup=False)
    assert allocator.malloc(request).success
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
    request = info(allocator, 8, cleanup=False)
    assert allocator.malloc(request).success
    assert batch_peak(allocator, request.resource, seq=8, common=8, remaining=60, reuse=True) == 24
    least = allocator.free_blocks
    for seq in range(9, 69):
        assert allocator.malloc(grown(request, seq, cleanup=True)).success
        least = min(least, allocator.free_blocks)
    linear, full = lists(request.resource)
    assert (len([b for b in linear if b != N]), len(full), least) == (9, 17, 1)


def test_a_fork_without_copies_shares_every_block() -> None:
    allocator = tiny_hybrid()
    request = info(allocator, 12, cleanup=False)
    assert allocator.malloc(request).success
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

"""RTP-LLM's conformance vectors for block lists and pools, and for full, linear and window groups."""

from __future__ import annotations

import pytest

from hkv.errors import OperationError, TopologyError
from hkv.model.group_policy import GroupType
from hkv.model.topology import Group, Topology
from tests.rtp_llm.build import FULL, LINEAR, SWA, attention, group, kind, shape, tiny_hybrid
from tests.rtp_llm.witness.block_ids import BlockIds
from tests.rtp_llm.witness.pool import BlockPool
from tests.rtp_llm.witness.resource import Resource

N = -1


def test_full_need() -> None:
    assert kind(FULL).first_need(8, 12, 3, 0, False) == (2, 2)


def test_a_prefix_is_matched_to_its_first_miss() -> None:
    full = kind(FULL)
    blocks = full.pool.malloc(4)
    full.insert([101, 102, 103, 104], blocks)
    assert full.match_prefix([101, 102, 103, 104]) == blocks
    assert full.match_prefix([101, 999, 103]) == blocks[:1]


def test_full_allocation() -> None:
    full = kind(FULL, block_size=2)
    ids = BlockIds()
    assert full.malloc(ids, 180, False) is None
    assert (len(ids), full.pool.free) == (0, 9)
    assert full.malloc(ids, 7, False) == []
    assert (ids.blocks, full.pool.free) == ([1, 2, 3, 4], 5)


def malloc(of, seq: int, reuse: bool = False, reserve: int = 0, ids: BlockIds | None = None) -> BlockIds:
    ids = BlockIds() if ids is None else ids
    assert of.malloc(ids, seq, reuse, reserve) is not None
    return ids


def test_only_the_tail() -> None:
    linear = kind(LINEAR)
    assert shape(malloc(linear, 16).blocks) == "...x"
    assert linear.pool.free == 8


@pytest.mark.parametrize(("tail", "blocks"), [(0, 1), (1, 1), (2, 2), (4, 4)])
def test_tails(tail: int, blocks: int) -> None:
    linear = kind(LINEAR, step=8, active_tail_blocks=tail)
    assert linear.peak(24, BlockIds(), 0, 0, False) == blocks
    assert len(malloc(linear, 24).real) == blocks


@pytest.mark.parametrize(("seq", "reserve", "wanted"), [(24, 0, "..x..x"), (20, 0, "..x.x"), (20, 3, "..x.xxx")])
def test_grid_tail_and_reserve(seq: int, reserve: int, wanted: str) -> None:
    assert shape(malloc(kind(LINEAR, step=3), seq, True, reserve).blocks) == wanted


def test_the_reused_tail_is_credited() -> None:
    linear = kind(LINEAR)
    needs = [tuple(linear.first_need(16, 24, 0, reused, True)) for reused in range(7)]
    assert needs == [(2, 1), (2, 1), (1, 1), (2, 1), (1, 1), (2, 1), (2, 0)]


def test_peak_from_a_list() -> None:
    assert kind(LINEAR).peak(12, BlockIds([N, 0, 1]), 4, 0, False) == 1


def test_peak_and_what_really_happens() -> None:
    linear = kind(LINEAR, step=8)
    first, last = linear.pool.malloc(2)
    ids = BlockIds([first, N, N, N, N, last])
    assert linear.peak(24, ids, 8, 0, True) == 1
    malloc(linear, 28, True, ids=ids)
    linear.cleanup(ids, True)
    assert shape(ids.blocks) == ".....xx"
    free = linear.pool.free
    malloc(linear, 32, True, ids=ids)
    assert linear.pool.free == free - 1
    linear.cleanup(ids, True)
    assert (linear.pool.free, shape(ids.blocks)) == (free, "......xx")


@pytest.mark.parametrize(("remaining", "peak"), [(0, 3), (4, 5)])
def test_peak_of_a_batch(remaining: int, peak: int) -> None:
    assert kind(LINEAR).first_peak(5, 4, remaining, 0, False, 2) == peak


def test_holes_that_are_not_wanted_stay() -> None:
    linear = kind(LINEAR)
    first, last = linear.pool.malloc(2)
    ids = malloc(linear, 12, ids=BlockIds([first, N, last]))
    assert ids.blocks == [first, N, last]


def test_a_cached_block_makes_room() -> None:
    linear = kind(LINEAR)
    blocks = linear.pool.malloc(9)
    linear.insert([7], blocks[:1])
    linear.pool.release(blocks[:1])
    assert linear.pool.free == 0
    assert malloc(linear, 4).blocks == blocks[:1]
    assert len(linear.cache.items) == 0


def test_a_referenced_block_needs_both_releases() -> None:
    linear = kind(LINEAR)
    (block,) = linear.pool.malloc(1)
    ids = BlockIds()
    linear.reference(ids, [N, block])
    assert ids.blocks == [N, block]
    linear.free(ids.blocks)
    assert linear.pool.free == 8
    linear.free(ids.blocks)
    assert linear.pool.free == 9


def test_again_is_nothing() -> None:
    linear = kind(LINEAR)
    ids = malloc(linear, 16)
    before = list(ids.blocks)
    assert malloc(linear, 16, ids=ids).blocks == before
    assert linear.pool.free == 8


def test_decoding_without_reuse_keeps_two_states() -> None:
    from tests.rtp_llm.build import granted, grown, lists

    allocator = tiny_hybrid(num_blocks=30)
    first = granted(allocator, 8, reuse=False, device_cache=False, cleanup=False)
    for seq in range(9, 41):
        assert allocator.malloc(grown(first, seq, cleanup=True)).success
    linear, full = lists(first.resource)
    assert shape(linear) == "........xx"
    assert shape(full) == "x" * 10


def test_window_need() -> None:
    window = kind(SWA)
    assert [window.need(8, 0, reserve) for reserve in (0, 1, 2, 5)] == [2, 3, 3, 4]
    assert [window.need(10, current, 0) for current in (1, 3, 5)] == [2, 0, 0]


def test_window_first_need() -> None:
    assert [kind(SWA).first_need(0, 12, 0, 0, reuse) for reuse in (False, True)] == [(0, 2), (0, 2)]
    assert kind(SWA, step=3, active_tail_blocks=1).first_need(0, 40, 0, 0, True) == (0, 1)
    assert kind(SWA, step=3, active_tail_blocks=1, enable_prefix_reuse=True).first_need(0, 40, 0, 0, True) == (0, 4)
    assert kind(SWA).first_need(0, 8, 2, 0, False) == (0, 3)
    assert [kind(SWA).first_need(0, 12, 0, reused, True).extra for reused in (2, 3)] == [1, 0]


def test_window_lists() -> None:
    window = kind(SWA, step=1)
    assert shape(malloc(window, 3).blocks) == "x"
    free = window.pool.free
    assert shape(malloc(window, 20).blocks) == "...xx"
    assert window.pool.free == free - 2


def test_grid_and_tail() -> None:
    ids = malloc(kind(SWA, step=3, enable_prefix_reuse=True), 40, True)
    assert [position for position, block in enumerate(ids.blocks) if block != N] == [2, 5, 8, 9]


def test_windows_with_grid_or_reserve() -> None:
    assert shape(malloc(kind(SWA, enable_prefix_reuse=True), 24, True).blocks) == ".x.xxx"
    assert shape(malloc(kind(SWA), 4, False, 2).blocks) == "xx"


def test_what_slid_out_is_given_back() -> None:
    window = kind(SWA, enable_prefix_reuse=True)
    ids = malloc(window, 5, True)
    malloc(window, 20, True, ids=ids)
    assert shape(ids.blocks) == "xx.xx"
    free = window.pool.free
    window.cleanup(ids, True)
    assert (shape(ids.blocks), window.pool.free) == (".x.xx", free + 1)


def test_cleanup_keeps_grid_and_tail() -> None:
    window = kind(SWA, enable_prefix_reuse=True)
    ids = BlockIds(window.pool.malloc(6))
    window.cleanup(ids, True)
    assert shape(ids.blocks) == ".x.xxx"


def test_sparse_groups_have_no_prefix_match() -> None:
    window = kind(SWA)
    with pytest.raises(OperationError):
        window.match_prefix([5])
    assert window.match(5) == N
    with pytest.raises(OperationError):
        kind(FULL).match(5)


def test_long_sequences_hold_two_blocks() -> None:
    """Every number of slots up to a million tokens; tokens beyond a whole block change only the number of slots."""
    window = kind(SWA, num_blocks=4, block_size=256, step=1)
    assert all(window.need(seq, 0, 0) == -(-seq // 256) for seq in range(1, 1_000_001))
    for slots in range(1, 3908, 13):
        ids = malloc(window, slots * 256 - slots % 256)
        assert len(ids) == slots
        assert ids.real == ids.blocks[-2:]
        window.free(ids.blocks)
        assert window.pool.free == 3


def test_growing_fills_with_a_value_and_resyncs() -> None:
    ids = BlockIds([N, 3], ratio=2)
    ids.resize(3, 2)
    assert (ids.blocks, ids.kernel) == ([N, 3, 2], [N, N, 6, 7, 4, 5])


def test_popping_drops_the_kernel_blocks_too() -> None:
    ids = BlockIds([N, 2, 3], ratio=2)
    assert ids.pop() == 3
    assert (ids.blocks, ids.kernel) == ([N, 2], [N, N, 4, 5])


def test_a_full_groups_blocks_split() -> None:
    resource = Resource(Topology((group("full", GroupType.FULL, 8, kernel=2),)))
    resource.groups[0].add([1, 2])
    assert resource.groups[0].kernel == list(range(4, 12))


def test_a_layer_of_two_groups_has_no_one_list() -> None:
    groups = tuple(Group(tag=tag, spec=attention(4), layers=("layer",)) for tag in ("a", "b"))
    with pytest.raises(TopologyError):
        Resource(Topology(groups, pools="independent")).layer_blocks()


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(10)
    assert pool.malloc(5) == [1, 2, 3, 4, 5]
    assert pool.malloc(10) == []
    assert pool.free == 4


def test_a_block_is_free_when_its_last_reference_goes() -> None:
    pool = BlockPool(10)
    seen = []
    blocks = pool.malloc(3)
    seen.append((pool.free, pool.available))
    pool.reference(blocks)
    seen.append((pool.free, pool.available))
    for _ in range(2):
        pool.release(blocks)
        seen.append((pool.free, pool.available))
    assert seen == [(6, 6), (6, 6), (6, 6), (9, 9)]


@pytest.mark.parametrize("block", [0, 1, 10])
def test_what_nobody_holds_cannot_be_released(block: int) -> None:
    with pytest.raises(OperationError):
        BlockPool(10).release([block])


def test_three_roles_and_three_counts() -> None:
    pool = BlockPool(6)
    held, copied, cached, both = ([block] for block in pool.malloc(4))
    pool.reference(copied, "connector")
    pool.reference(cached, "cache")
    pool.reference(both, "cache")
    pool.release([*copied, *cached])
    assert (pool.total, pool.free, pool.available, pool.not_in_use) == (5, 1, 2, 2)
    assert [pool.busy(role) for role in ("request", "connector", "cache")] == [2, 1, 2]
    assert held == [1]

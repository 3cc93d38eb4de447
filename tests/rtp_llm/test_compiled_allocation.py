"""RTP-LLM's conformance vectors for groups, allocators and ranks, against the compiled cache.

Named as in the tests of the reference. What they ask of single functions of the reference alone (matching, address
lists) has no compiled form; the prefix tree has tests of its own.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkv.dialects.rtp_llm.rules import admit
from hkv.dialects.rtp_llm.rules.admit import Ask
from hkv.dialects.rtp_llm.rules.operations import RtpCode, RtpColumn
from hkv.dialects.rtp_llm.rules.parameters import RtpParameters, View, shape_of
from hkv.state.pooled import PooledBuckets, Role
from hkv.state.pooled_workspace import ARRAYS, PooledSizes, PooledWorkspace
from hkv.state.status import Status
from tests.rtp_llm.build import FLASH, shape
from tests.rtp_llm.compiled import FULL, LINEAR, SWA, Compiled, alone, dsv4, single, tiny_hybrid, tiny_multi

OK = (Status.OK, 0)
N = -1


@jax.jit
def _need(parameters: RtpParameters, common: Any, seq: Any, reserve: Any, reused: Any, reuse: Any) -> Any:
    nothing: dict[str, Any] = dict.fromkeys((*ARRAYS, "ids", "results", "lane", "num_ids"))
    buckets = PooledBuckets(blocks=1, groups=1, pools=1, requests=1, sequences=1, row=1, chain=1, keys=1)
    work = PooledWorkspace(PooledSizes(buckets, 1, 1, 1, 0), **nothing)
    view = View(parameters.cache, parameters.groups.reshape(-1), None, parameters.groups.shape[0])
    ask = Ask(jnp.int32(0), jnp.int32(1), seq, seq, common, reserve, reuse)
    return admit.need(view, work, shape_of(view, jnp.int32(0)), ask, reused)


def need(of: Compiled, common: int, seq: int, reserve: int, reused: int, reuse: bool) -> tuple[int, int]:
    numbers = (np.int32(each) for each in (common, seq, reserve, reused))
    first, rest = _need(of.parameters, *numbers, np.bool_(reuse))
    return int(first), int(rest)


def test_full_need() -> None:
    assert need(alone(FULL), 8, 12, 3, 0, False) == (2, 2)


def test_full_allocation() -> None:
    full = alone(FULL, block_size=2)
    assert full.begin(180)[0] == Status.NO_ROOM_FOR_SEQUENCE
    assert (full.lists(), full.free()) == ([[]], 9)
    assert full.begin(7, slot=1) == OK
    assert (full.lists(1), full.free()) == ([[1, 2, 3, 4]], 5)


def test_only_the_tail() -> None:
    linear = alone(LINEAR)
    assert linear.begin(16, reuse=False) == OK
    assert (shape(linear.lists()[0]), linear.free()) == ("...x", 8)


@pytest.mark.parametrize(("tail", "blocks"), [(0, 1), (1, 1), (2, 2), (4, 4)])
def test_tails(tail: int, blocks: int) -> None:
    linear = alone(LINEAR, step=8, active_tail_blocks=tail)
    linear.request(24)
    assert linear.peak(0) == blocks
    assert linear.malloc(reuse=False) == OK
    assert shape(linear.lists()[0]).count("x") == blocks


@pytest.mark.parametrize(("seq", "reserve", "wanted"), [(24, 0, "..x..x"), (20, 0, "..x.x"), (20, 3, "..x.xxx")])
def test_grid_tail_and_reserve(seq: int, reserve: int, wanted: str) -> None:
    linear = alone(LINEAR, step=3)
    assert linear.begin(seq, reserve=reserve) == OK
    assert shape(linear.lists()[0]) == wanted


def test_the_reused_tail_is_credited() -> None:
    needs = [need(alone(LINEAR), 16, 24, 0, reused, True) for reused in range(7)]
    assert needs == [(2, 1), (2, 1), (1, 1), (2, 1), (1, 1), (2, 1), (2, 0)]


def test_peak_and_what_really_happens() -> None:
    linear = alone(LINEAR, step=8)
    linear.request(24)
    linear.place([[[True, False, False, False, False, True]]])
    assert linear.peak(8, reuse=True) == 1
    assert linear.grow(28) == OK
    assert shape(linear.lists()[0]) == ".....xx"
    free = linear.free()
    assert linear.grow(32, keep=True) == OK
    assert linear.free() == free - 1
    assert linear.malloc() == OK
    assert (linear.free(), shape(linear.lists()[0])) == (free, "......xx")


def test_holes_that_are_not_wanted_stay() -> None:
    linear = alone(LINEAR)
    linear.request(12)
    linear.place([[[True, False, True]]])
    assert linear.malloc(reuse=False, keep=True) == OK
    assert linear.lists() == [[1, N, 2]]


def test_a_cached_block_makes_room() -> None:
    linear = alone(LINEAR)
    cached = linear.cache({0: [7]})
    linear.request(32, slot=1)
    linear.place([[[True] * 8]], slot=1)
    assert linear.free() == 0
    assert linear.begin(4, reuse=False) == OK
    assert linear.lists() == [[cached[0][7]]]
    assert not linear.has(7, 0)


def test_again_is_nothing() -> None:
    linear = alone(LINEAR)
    assert linear.begin(16, reuse=False) == OK
    before = linear.lists()
    assert linear.malloc(reuse=False) == OK
    assert (linear.lists(), linear.free()) == (before, 8)


def test_decoding_without_reuse_keeps_two_states() -> None:
    hybrid = tiny_hybrid(30)
    assert hybrid.begin(8, reuse=False, device_cache=False) == OK
    for seq in range(9, 41):
        assert hybrid.grow(seq, reuse=False) == OK
    assert [shape(blocks) for blocks in hybrid.lists()] == ["........xx", "x" * 10]


def test_window_first_need() -> None:
    assert [need(alone(SWA), 0, 12, 0, 0, reuse) for reuse in (False, True)] == [(0, 2), (0, 2)]
    assert need(alone(SWA, step=3, active_tail_blocks=1), 0, 40, 0, 0, True) == (0, 1)
    assert need(alone(SWA, step=3, active_tail_blocks=1, enable_prefix_reuse=True), 0, 40, 0, 0, True) == (0, 4)
    assert need(alone(SWA), 0, 8, 2, 0, False) == (0, 3)
    assert [need(alone(SWA), 0, 12, 0, reused, True)[1] for reused in (2, 3)] == [1, 0]


def test_window_lists() -> None:
    window = alone(SWA, step=1)
    assert (window.begin(3, reuse=False), shape(window.lists()[0])) == (OK, "x")
    free = window.free()
    assert (window.begin(20, slot=1, reuse=False, device_cache=False), shape(window.lists(1)[0])) == (OK, "...xx")
    assert window.free() == free - 2


def test_a_hole_before_a_tail_of_one_block_is_no_error() -> None:
    for tail, blocks in ((1, "..x"), (2, ".xx")):
        window = alone(SWA, active_tail_blocks=tail)
        assert window.begin(12, reuse=False, device_cache=False) == OK
        assert shape(window.lists()[0]) == blocks


def test_grid_and_tail() -> None:
    window = alone(SWA, step=3, enable_prefix_reuse=True)
    assert window.begin(40) == OK
    assert [position for position, block in enumerate(window.lists()[0]) if block != N] == [2, 5, 8, 9]


def test_windows_with_grid_or_reserve() -> None:
    window = alone(SWA, enable_prefix_reuse=True)
    assert (window.begin(24), shape(window.lists()[0])) == (OK, ".x.xxx")
    plain = alone(SWA)
    assert (plain.begin(4, reserve=2, reuse=False), shape(plain.lists()[0])) == (OK, "xx")


def test_what_slid_out_is_given_back() -> None:
    window = alone(SWA, enable_prefix_reuse=True)
    assert window.begin(5) == OK
    assert window.grow(20, keep=True) == OK
    assert shape(window.lists()[0]) == "xx.xx"
    free = window.free()
    assert window.malloc() == OK
    assert (shape(window.lists()[0]), window.free()) == (".x.xx", free + 1)


def test_cleanup_keeps_grid_and_tail() -> None:
    window = alone(SWA, enable_prefix_reuse=True)
    window.request(24)
    window.place([[[True] * 6]])
    assert window.malloc() == OK
    assert shape(window.lists()[0]) == ".x.xxx"


def test_the_version_and_residence() -> None:
    cache = single()
    assert cache.version == -1
    assert cache.begin(4) == OK
    cache.do(RtpCode.INSERT)
    assert cache.version == 0
    cache.do(RtpCode.INSERT, resident=1)
    cache.do(RtpCode.INSERT)
    assert cache.version == 2
    cache.do(RtpCode.FREE)
    assert cache.do(RtpCode.EVICT, least=1)[0][RtpColumn.VALUE] == 0


def test_a_batch_shares_whole_blocks() -> None:
    cache = single(block_size=8)
    assert cache.begin(17, batch=3) == OK
    rows = [cache.lists(row=row)[0] for row in range(3)]
    assert [len(row) for row in rows] == [3, 3, 3]
    assert len({row[0] for row in rows}) == 1
    assert cache.free() == 4


def test_the_reserve_counts_for_new_requests_only() -> None:
    cache = single(block_size=1, reserve_blocks=2)
    assert cache.begin(8)[0] == Status.NO_ROOM_FOR_SEQUENCE
    assert (cache.lists(), cache.free()) == ([[]], 9)
    assert cache.begin(7, slot=1) == OK
    assert cache.grow(9, slot=1) == OK
    assert cache.free() == 0


def test_resident_blocks_are_no_room() -> None:
    cache = single(6)
    cache.cache({0: [900, 901, 902, 903]}, resident=True)
    assert cache.begin(13, batch=2, keys=[1, 2, 3])[0] == Status.NOT_EVICTABLE
    assert (cache.free(), cache.reader.available(cache.state)) == (1, 5)
    assert [cache.lists(row=row) for row in range(2)] == [[[]], [[]]]


def test_a_failed_growth_is_taken_back() -> None:
    cache = single(8)
    assert cache.begin(4, batch=3) == OK
    assert cache.grow(16, batch=3)[0] == Status.NOT_EVICTABLE
    assert cache.free() == 6
    assert [cache.lists(row=row) for row in range(3)] == [[[1]], [[1]], [[1]]]


def test_the_verdict_is_given_before_blocks_go_back() -> None:
    cache = single()
    assert cache.begin(24) == OK
    assert cache.begin(16, slot=1)[0] == Status.NO_ROOM
    assert (cache.free(), cache.lists(1)) == (3, [[]])


def test_peaks() -> None:
    cache = single()
    cache.request(8)
    cache.request(8, slot=1, reserve=3)
    assert [cache.peak(100, slot) for slot in (0, 1)] == [27, 28]
    cache.request(8, slot=2, reserve=4)
    cache.place([[[True, True]]])
    cache.place([[[True, True]]], slot=2)
    assert [cache.peak(0), cache.peak(4), cache.peak(4, slot=2)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("seq", "remaining", "width", "peak"), [(9, 0, 2, 0), (9, 0, 4, 2), (9, 4, 2, 2), (9, 4, 4, 6), (12, 0, 4, 0)]
)
def test_peaks_of_a_batch(seq: int, remaining: int, width: int, peak: int) -> None:
    cache = single(16)
    cache.request(seq, batch=2)
    cache.place([[[True] * 3], [[True] * 3]])
    assert cache.peak(remaining, width=width) == peak


def test_a_fork_takes_what_was_estimated() -> None:
    cache = single(6)
    assert cache.begin(5) == OK
    assert cache.peak(0, width=4) == 3
    assert cache.fork([0, 0, 0, 0]) == [[0, 2, 3], [0, 2, 4], [0, 2, 5]]
    assert (cache.free(), cache.lists(row=3)) == (0, [[1, 2]])


def test_a_policy_without_reuse() -> None:
    cache = single(policy={"enable_prefix_reuse": False})
    cache.cache({0: [1, 2, 3, 4]})
    assert cache.begin(16, keys=[1, 2, 3, 4]) == OK
    version = cache.version
    cache.do(RtpCode.INSERT)
    assert cache.version == version


def test_keys_but_the_last_are_matched() -> None:
    cache = single()
    cached = cache.cache({0: [1, 2, 3]})[0]
    assert cache.begin(12, keys=[1, 2, 3]) == (Status.OK, 8)
    assert cache.lists()[0][:2] == [cached[1], cached[2]]


def test_a_fork_that_fails_has_freed_what_nobody_goes_on_from() -> None:
    cache = single(4)
    assert cache.begin(5, batch=2) == OK
    assert cache.lists(row=1) == [[1, 3]]
    assert cache.fork([0, 0, 0]) is None
    assert [cache.lists(row=row) for row in range(2)] == [[[1, 2]], [[]]]
    assert cache.free() == 1


def test_the_hit_ends_where_both_groups_have_a_block() -> None:
    cache = tiny_hybrid()
    cached = cache.cache({1: [100, 101, 102], 0: [101]})
    assert cache.begin(12, keys=[100, 101, 102]) == (Status.OK, 8)
    linear, full = cache.lists()
    assert full[:2] == [cached[1][100], cached[1][101]]
    assert linear[:2] == [N, cached[0][101]]
    assert (shape(linear), shape(full)) == (".xx", "xxx")


def test_an_inserted_prefix_is_reused_whole() -> None:
    cache = tiny_hybrid()
    assert cache.begin(12, keys=[100, 101, 102], reuse=False, device_cache=False) == OK
    cache.do(RtpCode.INSERT)
    cache.do(RtpCode.FREE)
    assert cache.begin(16, slot=1, keys=[100, 101, 102, 103]) == (Status.OK, 12)


def test_a_fork_without_blocks_changes_nothing() -> None:
    cache = tiny_hybrid(4)
    cache.request(4)
    cache.place([[[True], [True]]])
    before = cache.state.references.copy()
    assert cache.fork([0, 0]) is None
    assert (cache.lists(), cache.free()) == ([[1], [2]], 1)
    np.testing.assert_array_equal(cache.state.references[..., :3], before[..., :3])


def test_a_fork_copies_into_what_is_dropped() -> None:
    cache = tiny_hybrid(5)
    cache.request(4, batch=2)
    cache.place([[[True], [True]], [[True], [True]]])
    assert cache.fork([1, 1]) == [[0, 3, 1], [1, 4, 2]]
    assert [cache.lists(row=row) for row in range(2)] == [[[1], [2]], [[3], [4]]]
    assert cache.free() == 0
    cache.do(RtpCode.FREE)
    assert cache.free() == 4


def test_a_reused_tail_and_the_grid_before_it() -> None:
    cache = tiny_hybrid(16)
    cached = cache.cache({1: [100, 101, 102], 0: [100, 101, 102]})
    assert cache.begin(20, keys=[100, 101, 102, 103, 104])[0] == Status.OK
    linear = cache.lists()[0]
    assert shape(linear) == ".xxxx"
    assert linear[2] == cached[0][102]
    assert linear[1] not in cached[0].values()


def test_cleanup_leaves_full_groups_alone() -> None:
    cache = tiny_hybrid(16)
    cache.request(24)
    cache.place([[[True] * 6, [True] * 6]])
    assert cache.malloc() == OK
    assert [shape(blocks) for blocks in cache.lists()] == [".x.xxx", "xxxxxx"]


@pytest.mark.parametrize(("remaining", "peak"), [(0, 10), (4, 12)])
def test_peak_with_a_longer_tail(remaining: int, peak: int) -> None:
    cache = tiny_hybrid(30, tail=4)
    cache.request(24)
    assert cache.peak(remaining) == peak


def test_a_batch_that_fits_exactly() -> None:
    cache = tiny_hybrid(7)
    cache.request(5, batch=2)
    assert [cache.peak(remaining, width=2) for remaining in (0, 4)] == [6, 10]
    assert cache.malloc(reuse=False, device_cache=False) == OK
    assert cache.free() == 0


def test_the_estimate_is_what_decoding_takes() -> None:
    cache = tiny_hybrid(28)
    assert cache.begin(8) == OK
    assert cache.peak(60, reuse=True) == 24
    least = cache.free()
    for seq in range(9, 69):
        assert cache.grow(seq) == OK
        least = min(least, cache.free())
    linear, full = cache.lists()
    assert (len([b for b in linear if b != N]), len(full), least) == (9, 17, 1)


def test_a_fork_without_copies_shares_every_block() -> None:
    cache = tiny_hybrid()
    assert cache.begin(12) == OK
    before, free = cache.lists(), cache.free()
    assert cache.fork([0, 0], copy=False) == []
    assert [cache.lists(row=row) for row in range(2)] == [before, before]
    assert cache.free() == free
    cache.do(RtpCode.FREE)
    assert cache.free() == 9


def test_a_hole_at_the_end_is_filled_without_a_copy() -> None:
    cache = tiny_hybrid()
    cache.request(4)
    cache.place([[[False], [True]]])
    assert cache.fork([0, 0]) == [[1, 1, 3]]
    assert [cache.lists(row=row) for row in range(2)] == [[[2], [3]], [[N], [1]]]


def test_the_reserve_is_shared_out() -> None:
    cache = tiny_multi(20, 6, reserve_blocks=1, cp_size=2)
    assert cache.begin(32) == OK
    assert len(cache.lists()[1]) == 4


def test_what_never_fits() -> None:
    cache = tiny_multi(3, 3)
    assert cache.begin(9, reuse=False, device_cache=False)[0] == Status.NO_ROOM_FOR_SEQUENCE
    assert (cache.lists(), cache.free(0), cache.free(1)) == ([[], []], 2, 2)


def test_the_cache_outlives_a_refusal() -> None:
    cache = tiny_multi(4, 4, reserve_blocks=1000)
    cache.cache({0: [100], 1: [100]})
    assert cache.begin(8, keys=[100, 101])[0] != Status.OK
    assert (cache.reader.cached(cache.state), cache.reader.available(cache.state)) == (2, 6)


def test_both_lists_are_restored() -> None:
    cache = tiny_multi(4, 2)
    assert cache.begin(4) == OK
    before, held = cache.lists(), cache.state.references.copy()
    assert cache.grow(9)[0] == Status.NOT_EVICTABLE
    assert cache.lists() == before
    np.testing.assert_array_equal(cache.state.references[..., :3], held[..., :3])


def test_deepseek_v4_on_two_ranks() -> None:
    """In order of use the first keys leave last, so that all are taken out here."""
    cache = dsv4(FLASH, cp_size=2)
    keys = list(range(100, 111))
    assert cache.begin(43, keys=keys, device_cache=False) == OK
    cache.do(RtpCode.INSERT)
    cache.do(RtpCode.FREE)
    assert cache.begin(44, slot=1, keys=keys)[1] == 4 * 4 * 2
    cache.do(RtpCode.FREE, 1)
    row, ids = cache.do(RtpCode.EXPORT, least=100)
    table = ids[: 8 * row[RtpColumn.COUNT]].reshape(-1, 8)
    assert sorted(table[:, 0]) == [101, 103, 105, 107, 109]
    assert cache.reader.cached(cache.state) > 0
    pairs = [number for record in table for group, block in enumerate(record[1:]) if block for number in (group, block)]
    assert cache.do(RtpCode.RELEASE, 0, pairs, role=int(Role.CACHE))[0][RtpColumn.STATUS] == Status.OK
    assert cache.reader.cached(cache.state) == 0
    assert [cache.free(pool) for pool in range(7)] == [count - 1 for count in cache.config.num_blocks]


def test_deepseek_v4_decodes() -> None:
    cache = dsv4(FLASH)
    assert cache.begin(16, reuse=False, device_cache=False) == OK
    for blocks in range(5, 8):
        free = sum(cache.free(pool) for pool in range(7))
        assert cache.grow(4 * blocks, reuse=False) == OK
        assert sum(cache.free(pool) for pool in range(7)) == free - 7 + 4
        for tag, ids in zip(cache.config.topology.tags, cache.lists(), strict=True):
            tail = {"hca_state": 1, "csa_state": 2, "indexer_state": 2, "swa_kv": 2}.get(tag, blocks)
            assert shape(ids) == "." * (blocks - tail) + "x" * tail


@pytest.mark.parametrize("with_tails", [True, False])
def test_groups_without_reuse_have_no_vote(with_tails: bool) -> None:
    cache = dsv4(FLASH, shared=True)
    full, policies = cache.config.full_groups, cache.config.policies
    cached = [g for g in range(7) if g in full or (with_tails and policies[g].enable_prefix_reuse)]
    assert len(cached) == (6 if with_tails else 3)
    cache.cache({index: [100, 101] for index in cached})
    assert cache.begin(12, keys=[100, 101, 102])[1] == (8 if with_tails else 0)


def test_ranks_match_canonical_keys() -> None:
    cache = tiny_hybrid(cp_size=2)
    cache.cache({0: [101], 1: [101]})
    assert cache.begin(16, keys=[100, 101, 102, 103]) == (Status.OK, 8)
    assert len(cache.lists()[1]) == 2


def test_ranks_insert_canonical_keys() -> None:
    cache = tiny_hybrid(20, cp_size=2)
    assert cache.begin(16, keys=[100, 101, 102, 103], device_cache=False) == OK
    cache.do(RtpCode.INSERT)
    assert [key for key in (100, 101, 102, 103) if cache.has(key, 1)] == [101]


def test_a_virtual_block_is_one_block_on_every_rank() -> None:
    cache = dsv4(FLASH, cp_size=4)
    assert cache.begin(16) == OK
    assert [len(ids) for ids in cache.lists()] == [1] * 7

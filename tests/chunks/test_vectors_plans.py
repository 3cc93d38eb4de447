"""Conformance vectors of LMCache 0.5.6 for plans, keys and lookup: numbers that its own code produced."""

from __future__ import annotations

import pytest

from hkv.chunks import plans
from hkv.chunks.objects import object_groups
from hkv.chunks.plans import Row, longest_prefix, recurrent_hit, servable_lengths
from hkv.errors import OperationError
from hkv.keys.blake3 import ObjectKey, chunk_keys, kv_rank, none_hash
from tests.chunks.kernel_group_builders import group, mla


@pytest.mark.parametrize(
    ("per_chunk", "per_window", "cases"),
    [
        (4, 2, {0: 0, 1: 0, 2: 0, 3: 1, 4: 2, 5: 2, 7: 3, 8: 4}),
        (16, 4, {12: 0, 13: 1, 16: 4, 30: 6}),
        (128, 4, {127: 3}),
        (8, 8, {11: 11}),
    ],
)
def test_skips(per_chunk, per_window, cases):
    assert {blocks: plans.skip_in_window(per_chunk, per_window, blocks) for blocks in cases} == cases


def test_downsample():
    assert plans.downsample(range(11, 19), 4, 2) == [13, 14, 17, 18]
    windowed = group(slots=32, window=128, blocks=9999)
    kept = plans.downsample(
        range(19 * 128), plans.blocks_per_chunk(windowed, 4096), plans.blocks_per_window(windowed, 4096)
    )
    assert kept == [chunk * 128 + block for chunk in range(19) for block in range(124, 128)]


def test_batches():
    assert list(plans.batches(range(10), 3, 2)) == [(2, (2, 3, 4)), (5, (5, 6, 7)), (8, (8, 9))]
    for bad in ({"batch": 0}, {"batch": 1, "skip": -1}):
        with pytest.raises(OperationError):
            list(plans.batches(range(3), **bad))


def launches(groups, ids, chunk, present, **options):
    found = object_groups(groups, chunk)[0]
    return plans.plan_transfer(groups, found, ids, chunk, "retrieve", present, **options)


def test_batches_of_four():
    groups = [group(slots=4)]
    ids = [list(range(10, 22))]
    present = [True] * 6

    def brief(**options):
        return [
            (launch.block_ids, len(launch.objects), launch.skip)
            for launch in launches(groups, ids, 8, present, **options)
        ]

    first, second = tuple(range(10, 18)), tuple(range(18, 22))
    assert brief() == [(first, 4, 0), (second, 2, 0)]
    assert brief(skip_tokens=32) == [(second, 2, 0)]
    assert brief(skip_tokens=36) == [(second, 2, 1)]
    assert brief(skip_tokens=48) == []


def test_a_missing_object_stops_a_retrieve_before_it_starts():
    with pytest.raises(OperationError, match="no object for chunk 5"):
        launches([group(slots=4)], [list(range(12))], 8, [True] * 5 + [False])


def test_only_the_window_of_each_chunk():
    (launch,) = launches([group(slots=4, window=8)], [list(range(50, 62))], 16, [True] * 3)
    assert launch.block_ids == (52, 53, 56, 57, 60, 61)


@pytest.mark.parametrize(
    ("skip", "full", "window"), [(4, 1, 0), (8, 2, 0), (12, 3, 1), (16, 4, 2), (20, 5, 2), (28, 7, 3)]
)
def test_skips_of_full_and_windowed_groups(skip, full, window):
    groups = [group(slots=4), group(slots=4, window=8)]
    found = launches(groups, [list(range(12)), list(range(50, 62))], 16, [True] * 3, skip_tokens=skip)
    assert [launch.skip for launch in found] == [full, window]


@pytest.mark.parametrize(("skip", "blocks"), [(0, 0), (64, 1), (100, 1), (256, 4), (300, 4)])
def test_skips_are_floored_to_blocks(skip, blocks):
    groups = [mla(layers=2)]
    found = launches(groups, [[3, 1, 4, 5, 9, 2, 6, 0]], 256, [True] * 2, skip_tokens=skip)
    assert [launch.skip for launch in found] == [blocks]


def test_a_chunk_without_a_kept_block_is_not_stored():
    groups = [group(slots=16, window=16, recurrent=True)]
    (found,) = object_groups(groups, 32, separate=True)
    ids = [[0, 5, 7, 0]]
    assert plans.null_chunks(groups, found, ids, 32) == [False, True]
    assert plans.null_chunks(groups, found, ids, 32, bugs=frozenset({"lmcache-null-mask"})) == [False, False]
    assert plans.downsample(ids[0], 2, 1) == [5, 0]


def test_a_store_moves_all_chunks_one_by_one_and_leaves_holes():
    groups = [group(slots=4, window=8)]
    found = object_groups(groups, 16, separate=True)[0]
    planned = plans.plan_transfer(groups, found, [list(range(50, 62))], 16, "store", [True, False, True])
    assert [(launch.block_ids, launch.objects) for launch in planned] == [((52, 53), (0,)), ((60, 61), (2,))]


def test_keys():
    assert none_hash().hex() == "7e3eff9ef7613a50340eb12677ee03b83ac759fcba9bb32705f07248d56d473b"
    assert [key.hex() for key in chunk_keys(range(1, 11), 4)] == [
        "6309ed506b8721905753f5c73c070bb21c3aafbd9b474b1e231f41368b71123c",
        "98efc76eafb06cfe774c31ff151f300b61a614c27982a211bb8cdbd83a8c0e19",
    ]
    (zeros,) = chunk_keys([0] * 256, 256)
    assert zeros.hex() == "03edbe7e49c9198da23fa92679fd592f12679bb4ccc65b5c91f31dda79bf1fa9"
    assert kv_rank(8, 5, 4, 1) == 0x08050401


@pytest.mark.parametrize(
    "bad",
    [
        lambda: chunk_keys([-1] * 4, 4),
        lambda: chunk_keys([1 << 32] * 4, 4),
        lambda: chunk_keys(range(8), 4, start=2),
        lambda: chunk_keys(range(8), 4, end=12),
        lambda: ObjectKey(b"", "a@b", 0),
        lambda: ObjectKey(b"", "a", 0, cache_salt="x/y"),
        lambda: ObjectKey(b"", "a", 0, cache_salt="x" * 129),
        lambda: kv_rank(256, 0, 1, 0),
    ],
)
def test_bad_keys_are_refused(bad):
    with pytest.raises(OperationError):
        bad()


LOOKUPS = [
    ([({0, 1, 2, 3}, -1), ({2, 3, 4}, 2)], 4, [(0, 1, 2, 3), (2, 3)], None),
    ([(range(5), -1), ({4}, 1)], 5, None, None),
    ([(range(5), -1), ({0, 2}, 1)], 3, None, [1, 3]),
    ([({1, 2, 3, 4}, 2)], 5, [(3, 4)], [3, 4, 5]),
    ([({0, 1, 3, 4}, 2)], 5, None, [1, 2, 5]),
    ([({0, 1, 2}, -1), ((), -1)], 0, [(), ()], []),
    ([(range(5), -1), ({1, 2, 3}, 3), ({0, 4}, 1)], 0, None, None),
    ([(range(5), -1), (range(5), 2), ({3}, 1)], 4, None, None),
]


@pytest.mark.parametrize(("rows", "hit", "retained", "servable"), LOOKUPS)
def test_lookup(rows, hit, retained, servable):
    made = [Row.of(present, window) for present, window in rows]
    result = longest_prefix(made, 5)
    assert result.hit == hit
    if retained is not None:
        assert list(result.retained) == retained
    if servable is not None:
        assert servable_lengths(made, 5) == servable


@pytest.mark.parametrize(("pages", "hit"), [([[2, 5]], 5), ([[]], 0), ([[2, 5], [2]], 2)])
def test_recurrent_states(pages, hit):
    assert recurrent_hit(pages) == hit

"""Conformance vectors of LMCache 0.5.6 for windows and groups: numbers that its own code produced."""

from __future__ import annotations

import pytest

from hkv.chunks.detection import Hints, TensorView, discover_per_layer_formats
from hkv.chunks.kernel_groups import (
    EngineGroupInfo,
    expand_block_ids,
    group_layers,
    slice_block_ids,
)
from hkv.chunks.objects import object_groups, object_layout
from hkv.errors import LayoutError
from tests.chunks.kernel_group_builders import F, group, mla


@pytest.mark.parametrize(
    ("window", "chunks"), [(-1, -1), (16, 1), (64, 1), (256, 1), (257, 2), (512, 2), (513, 3), (1024, 4)]
)
def test_windows_in_chunks(window, chunks):
    groups = [group(window=window)]
    assert [found.window for found in object_groups(groups, 256, separate=True)] == [chunks]


@pytest.mark.parametrize(("window", "tokens"), [(-1, 256), (64, 64), (256, 256), (300, 256)])
def test_windows_within_a_chunk(window, tokens):
    assert group(window=window).kept_tokens(256) == tokens


def test_a_window_of_zero_keeps_nothing():
    groups = [group(window=0)]
    (found,) = object_groups(groups, 256, separate=True)
    assert found.window == -1
    assert object_layout(groups, found, 256).nbytes == 0


def test_full_windows_leave_recurrent_groups_alone():
    groups = [group(slots=16, window=16, recurrent=True)]
    (found,) = object_groups(groups, 32, separate=True, full_window=True)
    assert found.window == 1
    assert object_layout(groups, found, 32, full_window=True).region(0).slots == 16
    widened = object_layout(groups, found, 32, full_window=True, bugs=frozenset({"lmcache-full-window"}))
    assert widened.region(0).slots == 32


def test_windowed_groups_get_their_own_objects():
    groups = [group(), group(window=64), group()]
    found = object_groups(groups, 256, separate=True)
    assert [(entry.members, entry.window) for entry in found] == [((0, 2), -1), ((1,), 1)]


def latent_and_indexer(layers: int):
    views = [TensorView((7, 64, 576)), TensorView((7, 64, 132), "uint8")] * (layers // 2)
    return discover_per_layer_formats(views, "vllm", Hints("NHD"))


def test_interleaved_shapes_make_two_groups():
    formats, views = latent_and_indexer(6)
    assert [found.layer_indices for found in group_layers(formats, views)] == [(0, 2, 4), (1, 3, 5)]


def test_formats_separate_layers_of_one_geometry():
    views = [TensorView((7, 64, 132), "int8"), TensorView((7, 64, 132), "uint8")]
    formats, seen = discover_per_layer_formats(views, "vllm", Hints("NHD"))
    assert formats == [3, 14]
    assert len(group_layers(formats, seen)) == 2


def test_layers_without_infos_are_of_the_first_engine_group():
    (found,) = group_layers([F(3), F(3)], [TensorView((7, 64, 576))] * 2)
    assert found.info == EngineGroupInfo(0, (0, 1))


def test_infos_must_describe_the_groups():
    views = [TensorView((7, 64, 576)), TensorView((7, 64, 576))]
    with pytest.raises(LayoutError, match="infos"):
        group_layers([F(3), F(3)], views, [EngineGroupInfo(0, (1,)), EngineGroupInfo(1, (0,))])


def test_different_numbers_of_blocks_make_different_groups():
    views = [TensorView((8, 64, 576)), TensorView((9, 64, 576))]
    assert [found.geometry.num_blocks for found in group_layers([F(3), F(3)], views)] == [8, 9]
    (merged,) = group_layers([F(3), F(3)], views, bugs=frozenset({"lmcache-group-key"}))
    assert merged.geometry.num_blocks == 8


@pytest.mark.parametrize(("chunk", "window"), [(100, -1), (256, 24)])
def test_chunks_and_windows_are_whole_blocks(chunk, window):
    with pytest.raises(LayoutError):
        group(slots=16, tokens_per_block=16, window=window).check_chunk(chunk)


def test_compressed_blocks():
    compressed = mla("uint8", 132, slots=2, tokens_per_block=256)
    assert (compressed.num_slots(256), compressed.num_blocks(256)) == (2, 1)


def test_block_ids_of_a_range():
    ids = {0: range(100, 108)}
    assert slice_block_ids(ids, [64], 64, 320) == [[101, 102, 103, 104]]
    with pytest.raises(LayoutError, match="range"):
        slice_block_ids(ids, [64], 32, 320)
    assert slice_block_ids(ids, [0], 0, 64) == [[]]
    assert slice_block_ids({}, [64], 0, 64) == [[]]


def test_block_ids_per_kernel_group():
    infos = [EngineGroupInfo(0), EngineGroupInfo(1), EngineGroupInfo(0)]
    assert expand_block_ids(infos, [[1, 2], [3]]) == [[1, 2], [3], [1, 2]]
    assert expand_block_ids([], [1, 2]) == [[1, 2]]
    assert expand_block_ids([], []) == [[]]

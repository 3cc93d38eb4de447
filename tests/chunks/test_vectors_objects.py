"""Conformance vectors of LMCache 0.5.6 for objects and what moves them: numbers that its own code produced."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

import reference.chunks.transfer as reference
from hkv.chunks import plans
from hkv.chunks.detection import Hints, TensorView, discover_per_layer_formats
from hkv.chunks.formats import TRAITS, num_tensors
from hkv.chunks.kernel_groups import (
    EngineGroupInfo,
    expand_block_ids,
    group_layers,
    slice_block_ids,
)
from hkv.chunks.objects import StagingLayout, object_groups, object_layout
from hkv.chunks.transfer import Transfer, unpack
from hkv.errors import LayoutError, OperationError
from tests.chunks.kernel_group_builders import F, group, mla, whole


def test_two_attention_geometries():
    groups = [group(layers=4), group(heads=16, dtype="float16", layers=2)]
    layout = object_layout(groups, whole(groups), 256)
    assert [(region.offset, region.nbytes) for region in layout.regions] == [(0, 2097152), (2097152, 2097152)]
    assert (layout.nbytes, StagingLayout((layout,)).nbytes) == (4194304, 16777216)


def test_latents_and_indexers():
    groups = [mla(layers=3), mla("uint8", 132, layers=3)]
    layout = object_layout(groups, whole(groups), 256)
    assert [region.nbytes for region in layout.regions] == [884736, 101376]
    assert (layout.nbytes, StagingLayout((layout,)).nbytes, layout.nbytes // 256) == (986112, 3944448, 3852)


def test_regions_are_not_aligned():
    groups = [mla("uint8", 132, slots=2, tokens_per_block=256), mla()]
    layout = object_layout(groups, whole(groups), 256)
    assert [(region.offset, region.nbytes) for region in layout.regions] == [(0, 264), (264, 294912)]
    assert layout.nbytes == 295176


def test_separate_objects_in_a_staging_buffer():
    groups = [group(heads=8), group(heads=8, window=64), group(heads=16)]
    found = object_groups(groups, 256, separate=True)
    staging = StagingLayout(tuple(object_layout(groups, entry, 256) for entry in found))
    assert [(entry.members, entry.window) for entry in found] == [((0, 2), -1), ((1,), 1)]
    assert [layout.nbytes for layout in staging.objects] == [1572864, 131072]
    assert (staging.offset(0, 1), staging.offset(1, 0)) == (1572864, 1703936)
    with pytest.raises(LayoutError, match="group = 1"):
        staging.offset(0, 0, 1)
    with pytest.raises(LayoutError, match="slot"):
        staging.offset(4, 0)


def test_the_indexer_of_one_byte_rows():
    groups = [mla(layers=2), group(3, 64, 1, 132, "int8", layers=2)]
    layout = object_layout(groups, whole(groups), 256)
    assert [region.offset for region in layout.regions] == [0, 589824]
    assert layout.nbytes == 657408


GOLDEN = {
    0: ("5f9d4e39fb2657e7", "17b8470e4861299d", "76d22f0f0ade823a", "adcb140598f980b0"),
    1: ("581474c3a300b1db", "bc1dd69385567e62", "b3108a08e5c54678", "d22b2ee7daeb7aa2"),
    2: ("ae7585b3b8067497", "3a99997f4c23650a", "fcfdf4c593d87dc4", "2fc5faea3e00d165"),
    3: ("72fe7fc4640a880c", "9bc9b09a90fd3582", "fe7749283049ce85", "7b6854cd3bfeeb4c"),
    5: ("72fe7fc4640a880c", "9bc9b09a90fd3582", "fe7749283049ce85", "7b6854cd3bfeeb4c"),
    6: ("23eeb10819b7c33d", "99c576a969a9293b", "4dcaf4659b4df769", "de22047ae7a097a8"),
    8: ("289ff28304947de0", "841e1825e651dfde", "cda08c445c87ab50", "7c6b547e518af97f"),
}
"""Format -> digest of a store with skip 0 and 1, and of a retrieve with skip 0 and 1."""


def golden_setup(fmt):
    heads = 1 if fmt in (3, 5) else 3
    entry = group(fmt, slots=2, heads=heads, size=4, dtype="int32", layers=2, blocks=5)
    geometry = entry.geometry
    region = object_layout([entry], whole([entry]), 4).region(0)
    shape = (geometry.pages_per_tensor, geometry.page_bytes)
    numel = shape[0] * shape[1] // 4
    count = num_tensors(TRAITS[F(fmt)].structure, 2)
    tensors = [np.arange(i * numel, (i + 1) * numel, dtype="<i4").view(np.uint8).reshape(shape) for i in range(count)]
    return geometry, region, tensors


def digest(arrays) -> str:
    return hashlib.sha256(b"".join(np.asarray(array).tobytes() for array in arrays)).hexdigest()[:16]


@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize("fmt", GOLDEN)
def test_store(fmt, skip):
    """By the reference, which `test_transfer.py` holds the compiled form to."""
    geometry, region, tensors = golden_setup(fmt)
    objects = np.full((2, region.nbytes // 4), -1, "<i4").view(np.uint8)
    ids = [3, 0, 4, 1]
    dropped = reference.pack(geometry, region, tensors, objects, ids, skip)
    assert dropped == 0
    assert digest(objects) == GOLDEN[fmt][skip]


@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize("fmt", GOLDEN)
def test_retrieve(fmt, skip):
    """By the reference, which `test_transfer.py` holds the compiled form to."""
    geometry, region, tensors = golden_setup(fmt)
    tensors = [np.full(tensor.size // 4, -7, "<i4").view(np.uint8).reshape(tensor.shape) for tensor in tensors]
    elements = region.nbytes // 4
    objects = np.stack([1000 * i + np.arange(elements, dtype="<i4") for i in range(2)]).view(np.uint8)
    ids = [2, 1, 0, 4]
    dropped = reference.unpack(geometry, region, tensors, objects, ids, skip)
    assert dropped == 0
    assert digest(tensors) == GOLDEN[fmt][2 + skip]


@pytest.mark.parametrize(("head_bytes", "width"), [(1152, 16), (132, 4), (264, 4), (66, 2), (8, 4), (24, 4), (2, 2)])
def test_vector_widths(head_bytes, width):
    assert group(3, 16, 1, head_bytes, "int8").geometry.vector_bytes == width


def test_vector_odd_rows_have_no_width():
    with pytest.raises(LayoutError, match="head_bytes = 131"):
        _ = group(3, 16, 1, 131, "int8").geometry.vector_bytes


def test_a_skip_beyond_the_end_moves_nothing():
    geometry, region, tensors = golden_setup(1)
    before = [tensor.copy() for tensor in tensors]
    arrays = tuple(tensor.copy() for tensor in tensors)
    objects = np.ones((2, region.nbytes), np.uint8)
    after, dropped = unpack(Transfer(geometry, region), arrays, objects, np.array([2, 1, 0, 4], np.int32), np.int32(99))
    assert int(dropped) == 0
    assert all(np.array_equal(a, b) for a, b in zip(after, before, strict=True))


SPAN = 64 << 20
HOST_COPIES = [
    (SPAN - 2 * 132, 4 * 132, SPAN, [264, 264]),
    (SPAN - 132, 3 * 132, SPAN, [132, 264]),
    (SPAN - 3 * 132, 6 * 132, SPAN, [396, 396]),
    (0, 132, SPAN, [132]),
    (3 * SPAN // 4, SPAN // 2, SPAN, [SPAN // 4, SPAN // 4]),
    (7 * SPAN // 4, 3 * SPAN // 2, SPAN, [SPAN // 4, SPAN, SPAN // 4]),
    (16, 200, 64, [48, 64, 64, 24]),
    (32, 64, 64, [32, 32]),
    (0, 192, 64, [64, 64, 64]),
]


@pytest.mark.parametrize(("offset", "nbytes", "alignment", "pieces"), HOST_COPIES)
def test_host_copies(offset, nbytes, alignment, pieces):
    assert plans.host_copy_pieces(offset, nbytes, alignment) == pieces


@pytest.mark.parametrize("alignment", [0, -64, 48])
def test_a_host_copy_needs_a_power_of_two(alignment):
    with pytest.raises(OperationError, match="power of two"):
        plans.host_copy_pieces(0, 1, alignment)


# Windows and groups.


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

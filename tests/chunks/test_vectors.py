"""Conformance vectors of LMCache 0.5.6 for objects, plans, keys and lookup: numbers that its own code produced."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

import reference.chunks.transfer as reference
from hkv.chunks import plans
from hkv.chunks.detection import (
    Hints,
    TensorView,
    discover_per_layer_formats,
)
from hkv.chunks.formats import TRAITS, EngineKVFormat, num_tensors
from hkv.chunks.kernel_groups import (
    EngineGroupInfo,
    KernelGroup,
    PageGeometry,
    expand_block_ids,
    group_layers,
    slice_block_ids,
)
from hkv.chunks.objects import ObjectGroup, StagingLayout, object_groups, object_layout
from hkv.chunks.plans import ChunkRow, longest_prefix, servable_lengths
from hkv.chunks.transfer import Transfer, unpack
from hkv.errors import LayoutError, OperationError
from hkv.keys.blake3 import ObjectKey, chunk_keys, kv_rank, none_hash

F = EngineKVFormat


def group(fmt=1, slots=16, heads=8, size=64, dtype="bfloat16", layers=1, blocks=100, **info) -> KernelGroup:
    traits = TRAITS[F(fmt)]
    geometry = PageGeometry(F(fmt), traits.kv_size, layers, blocks, slots, heads, size, dtype)
    info.setdefault("layer_indices", tuple(range(layers)))
    return KernelGroup(tuple(range(layers)), geometry, EngineGroupInfo(0, **info))


def mla(dtype="bfloat16", size=576, slots=64, layers=1, **info) -> KernelGroup:
    return group(14 if (dtype, size) == ("uint8", 132) else 3, slots, 1, size, dtype, layers, **info)


def whole(groups) -> ObjectGroup:
    return object_groups(groups, 256)[0]


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


@pytest.mark.parametrize("alignment", [0, -64, 48])
def test_a_host_copy_needs_a_power_of_two(alignment):
    with pytest.raises(OperationError, match="power of two"):
        plans.host_copy_pieces(0, 1, alignment)


# Windows and groups.


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


def test_a_chunk_without_a_kept_block_is_not_stored():
    groups = [group(slots=16, window=16, recurrent=True)]
    (found,) = object_groups(groups, 32, separate=True)
    ids = [[0, 5, 7, 0]]
    assert plans.null_chunks(groups, found, ids, 32) == [False, True]
    assert plans.null_chunks(groups, found, ids, 32, bugs=frozenset({"lmcache-null-mask"})) == [False, False]
    assert plans.downsample(ids[0], 2, 1) == [5, 0]


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
    made = [ChunkRow.of(present, window) for present, window in rows]
    result = longest_prefix(made, 5)
    assert result.hit == hit
    if retained is not None:
        assert list(result.retained) == retained
    if servable is not None:
        assert servable_lengths(made, 5) == servable

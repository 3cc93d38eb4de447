"""Formats of engines' tensors as LMCache 0.5.6 finds them, by shape, strides and hint, and the pages of each."""

# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false
# (a nest of tensors is one tensor, or a list of nests)

from __future__ import annotations

import pytest

from hkv.chunks.detection import (
    Hints,
    TensorView,
    detect,
    discover_per_layer_formats,
    plane_row_elements,
    recover_contiguous_view,
)
from hkv.chunks.formats import TRAITS, EngineKVFormat
from hkv.chunks.kernel_groups import PageGeometry, page_geometry
from hkv.errors import LayoutError

F = EngineKVFormat


@pytest.mark.parametrize(
    ("hints", "expected"),
    [
        (Hints("NHD"), 1),
        (Hints("HND"), 6),
        (Hints("BLHNC"), 6),
        (Hints("BLNHC"), 1),
        (Hints(on_cpu=True), 6),
    ],
)
def test_planes_outermost(hints, expected):
    assert detect([TensorView((2, 7, 3, 4, 8))] * 2, "vllm", hints)[0] == expected


@pytest.mark.parametrize(
    ("shape", "layout", "expected"),
    [
        ((7, 2, 3, 4, 8), "NHD", 2),
        ((7, 2, 3, 4, 8), "HND", 7),
        ((7, 3, 4, 16), "NHD", 13),
        ((7, 3, 4, 16), "HND", 12),
    ],
)
def test_by_shape_and_hint(shape, layout, expected):
    assert detect([TensorView(shape)], "vllm", Hints(layout))[0] == expected


AMBIGUOUS = TensorView((2, 2, 3, 4, 8))
"""K and V of two blocks each, or two blocks of K and V."""


@pytest.mark.parametrize(("layout", "expected"), [("NHD", 1), ("HND", 6), ("BLNHC", 1), ("BLHNC", 6)])
def test_two_blocks_are_planes_to_lmcache_and_refused_here(layout, expected):
    bugs = frozenset({"lmcache-two-blocks"})
    assert detect([AMBIGUOUS] * 2, "vllm", Hints(layout), bugs)[0] == expected
    assert discover_per_layer_formats([AMBIGUOUS] * 2, "vllm", Hints(layout), bugs=bugs)[0] == [expected] * 2
    with pytest.raises(LayoutError, match="two blocks of K and V, have this shape"):
        detect([AMBIGUOUS] * 2, "vllm", Hints(layout))


def test_one_layer_of_two_blocks_among_others_is_refused():
    layers = [TensorView((2, 7, 3, 4, 8)), TensorView((7, 3, 32)), AMBIGUOUS]
    with pytest.raises(LayoutError, match="two blocks of K and V, have this shape"):
        discover_per_layer_formats(layers, "vllm", Hints("NHD"))
    found, _ = discover_per_layer_formats(layers, "vllm", Hints("NHD"), bugs=frozenset({"lmcache-two-blocks"}))
    assert found == [1, 3, 1]


@pytest.mark.parametrize(
    ("shape", "layout", "expected", "seen"),
    [
        ((7, 64, 1, 132), "NHD", 14, (7, 64, 132)),
        ((7, 1, 64, 132), "HND", 14, (7, 64, 132)),
        ((7, 1, 64, 132), "NHD", 13, (7, 1, 64, 132)),
    ],
)
def test_indexer_rows(shape, layout, expected, seen):
    found, views = detect([TensorView(shape, "uint8")], "vllm", Hints(layout))
    assert (found, views[0].shape) == (expected, seen)


def test_fragmented_layouts_are_refused():
    with pytest.raises(LayoutError, match="kv_layout"):
        detect([TensorView((7, 3, 4, 16))], "vllm", Hints("LHBNC"))


@pytest.mark.parametrize(
    ("planes", "expected"),
    [
        ([(7, 3, 4, 8), (7, 3, 4, 8)], 16),
        ([(7, 3, 1, 8), (7, 3, 1, 8)], 16),
        ([(7, 3, 1, 8), (7, 3, 1, 4)], 17),
        ([(7, 3, 1, 8)], 17),
    ],
)
def test_tuples_of_planes(planes, expected):
    assert detect([tuple(TensorView(shape) for shape in planes)], "vllm", Hints("NHD"))[0] == expected


def test_three_planes_of_several_heads_are_unknown():
    with pytest.raises(LayoutError, match="tensors"):
        detect([tuple(TensorView((7, 3, 4, 8)) for _ in range(3))], "vllm", Hints("NHD"))


def test_planes_of_uneven_bytes():
    with pytest.raises(LayoutError, match="19 bytes"):
        plane_row_elements([TensorView((7, 3, 1, 8), "float16"), TensorView((7, 3, 1, 3), "int8")])


def test_a_flat_pool_needs_its_geometry():
    hints = Hints(num_kv_heads=4, tokens_per_block=3, head_dim=8)
    found, view = detect(TensorView((7, 5, 2, 96)), "trtllm", hints)
    assert (found, view.shape) == (8, (7, 5, 2, 4, 3, 8))
    with pytest.raises(LayoutError, match="hints"):
        detect(TensorView((7, 5, 2, 95)), "trtllm", hints)
    with pytest.raises(LayoutError, match="hints"):
        detect(TensorView((7, 5, 2, 96)), "trtllm", Hints())


def test_a_permuted_view_is_undone():
    view = TensorView((2, 7, 3, 4, 8), strides=(672, 96, 8, 24, 1))
    assert recover_contiguous_view(view).shape == (2, 7, 4, 3, 8)


def test_a_single_head_goes_innermost():
    view = recover_contiguous_view(TensorView((4, 1, 196, 128), strides=(25152, 128, 128, 1)))
    assert (view.shape, view.strides) == ((4, 196, 1, 128), (25152, 128, 128, 1))


def test_blocks_may_be_padded():
    view = recover_contiguous_view(TensorView((5, 3, 16), strides=(100, 16, 1)))
    assert page_geometry(F(3), [view], 1).block_stride == 100


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((5, 3, 16), (100, 20, 1)),
        ((5, 3, 16), (40, 16, 1)),
        ((5, 3, 16), (100, 32, 2)),
        ((5,), (2,)),
    ],
)
def test_no_other_gap_is_accepted(shape, strides):
    with pytest.raises(LayoutError, match="gaps"):
        recover_contiguous_view(TensorView(shape, strides=strides))


@pytest.mark.parametrize(
    ("fmt", "shape", "strides"),
    [(1, (2, 7, 3, 4, 8), (1000, 96, 32, 8, 1)), (2, (7, 2, 3, 4, 8), (1000, 96, 32, 8, 1))],
)
def test_formats_with_planes_must_be_tight(fmt, shape, strides):
    with pytest.raises(LayoutError, match="tight"):
        page_geometry(F(fmt), [TensorView(shape, strides=strides)], 1)


EXTENTS = {"NB": 7, "NL": 2, "TWO": 2, "BS": 4, "NH": 3, "HS": 8, "CS": 16, "ONE": 1, "BSV": 4, "BSS": 8}
"""An extent for every axis that names of formats have; of those of format 14, slots and bytes of a row."""


@pytest.mark.parametrize("found", [found for found in F if TRAITS[found].block_axis], ids=lambda found: found.name)
def test_pages_have_the_axes_of_the_name(found):
    *levels, tensor = found.name.replace("TWO_HS", "CS").split("_X_")
    view = TensorView(tuple(EXTENTS[axis] for axis in tensor.split("_")))
    traits, tensors = TRAITS[found], view
    for _ in levels:
        tensors = [tensors]
    heads, row = 1 if traits.mla else 3, 16 if traits.fused else 8
    stride = view.strides[tensor.split("_").index("NB")] if traits.padded_blocks else 0
    assert page_geometry(found, tensors, 5) == PageGeometry(
        found, traits.kv_size, 5, 7, 4, heads, row, "bfloat16", stride
    )

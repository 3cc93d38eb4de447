"""The parts of a page: sizes that engines publish, and that parts neither overlap nor leave a page."""

from __future__ import annotations

import pytest

from hkv.errors import LayoutError
from hkv.layout.block_layout import Layout
from hkv.layout.content import QUANTIZATIONS, content_parts, packing, quantize
from hkv.layout.strided import StridedView
from hkv.spec import FullAttention, MLAAttention, OpaqueState

ATTENTION = FullAttention(block_size=4, num_kv_heads=2, head_size=128, dtype="bfloat16")
LATENT = MLAAttention(block_size=64, head_size=576, dtype="bfloat16")
INDEXER = MLAAttention(block_size=64, head_size=128, dtype="bfloat16", cache_role="indexer")

SIZES = {
    "none": (ATTENTION, 2, 512),
    "fp8_per_tensor": (ATTENTION, 2, 256),
    "int8_per_token_head": (ATTENTION, 2, 264),
    "fp8_per_token_head": (ATTENTION, 2, 264),
    "int4_per_token_head": (ATTENTION, 2, 136),
    "nvfp4": (ATTENTION, 4, 72),
    "kv_planes": (ATTENTION, 2, 512),
    "kv_halves": (ATTENTION, 2, 512),
    "rocm_pages": (ATTENTION, 2, 512),
    "fp8_ds_mla": (LATENT, 1, 656),
    "nvfp4_ds_mla": (LATENT, 1, 352),
    "fp8_ds_mla_v4": (LATENT, 1, 584),
    "mxfp8_ds_mla_v41": (LATENT, 1, 528),
    "fp8_indexer": (INDEXER, 1, 132),
}


def test_every_packing_is_tried():
    assert set(SIZES) == set(QUANTIZATIONS)


@pytest.mark.parametrize("name", SIZES)
def test_head_slots_and_bytes_of_a_state(name):
    spec, heads, content = SIZES[name]
    packed = quantize(spec, name)
    assert (packed.num_heads, packed.content_bytes) == (heads, content)
    assert packing(packed) == (name if name != "none" else "none")


@pytest.mark.parametrize("name", SIZES)
def test_parts_fill_a_page_without_overlap(name):
    spec = quantize(SIZES[name][0], name)
    layout = Layout.of_spec(spec, "LBHNC", num_blocks=2)
    taken: set[int] = set()
    for part in layout.content:
        view = layout.part_view(part.name, 0)
        assert view.dtype == part.dtype
        mine = {b for start, length in view.runs() for b in range(start, start + length)}
        assert len(mine) == view.nbytes
        assert not taken & mine
        taken |= mine
    unused = 2 * spec.num_states if name == "fp8_ds_mla_v4" else 0
    assert len(taken) == 2 * spec.page_size_bytes - unused
    assert max(taken) < layout.end


def test_scales_are_named_and_typed():
    parts = {p.name: (p.dtype, p.shape, p.offset) for p in content_parts(quantize(ATTENTION, "int8_per_token_head"), 4)}
    assert parts == {
        "key": ("int8", (128,), 0),
        "key_scale": ("float32", (1,), 128),
        "value": ("int8", (128,), 132),
        "value_scale": ("float32", (1,), 260),
    }
    parts = {p.name: (p.dtype, p.shape, p.offset) for p in content_parts(quantize(LATENT, "fp8_ds_mla"), 64)}
    assert parts == {
        "latent": ("float8_e4m3fn", (512,), 0),
        "scale": ("float32", (4,), 512),
        "rope": ("bfloat16", (64,), 528),
    }


def test_a_page_of_deepseek_v4_is_its_rows_and_then_its_scales():
    spec = MLAAttention(
        block_size=64, head_size=512, dtype="uint8", state_content_bytes=584, cache_dtype="fp8_ds_mla", alignment=576
    )
    assert spec.page_size_bytes == 37440
    layout = Layout.of_spec(spec, "BLHNC", num_blocks=3, num_layers=2)
    page = layout.address(1, 2, 0, 0)
    assert layout.element_address("latent", 1, 2, 0, 63, 0) == page + 63 * 576
    assert layout.element_address("rope", 1, 2, 0, 63, 1) == page + 63 * 576 + 450
    assert layout.element_address("scale", 1, 2, 0, 63, 6) == page + 64 * 576 + 63 * 8 + 6
    assert layout.locate_element(page + 64 * 576 + 7) is None


def test_a_packing_of_unknown_inside_is_one_part():
    spec = FullAttention(block_size=4, head_size=128, state_content_bytes=70, quantization="turboquant_k8v4")
    assert [(p.name, p.shape) for p in content_parts(spec, 4)] == [("packed", (70,))]
    wrong = FullAttention(block_size=4, head_size=128, state_content_bytes=70, quantization="int8_per_token_head")
    assert [(p.name, p.shape) for p in content_parts(wrong, 4)] == [("packed", (70,))]
    assert [(p.name, p.shape) for p in content_parts(OpaqueState(block_size=4, entry_bytes=7), 4)] == [("entry", (7,))]


def test_what_is_already_packed_stays():
    spec = FullAttention(block_size=4, head_size=128, state_content_bytes=70)
    assert quantize(spec, "nvfp4") is spec


@pytest.mark.parametrize(
    ("spec", "name", "message"),
    [
        (ATTENTION, "fp7", "quantization = 'fp7': expected one of none"),
        (FullAttention(block_size=4, head_size=24), "nvfp4", "a multiple of 16"),
        (FullAttention(block_size=4, head_size=32, head_size_v=16), "nvfp4", "the same for K and V"),
        (FullAttention(block_size=4, head_size=5), "int4_per_token_head", "a multiple of 2"),
        (FullAttention(block_size=4, head_size=96), "fp8_indexer", "a multiple of 128"),
        (FullAttention(block_size=4, head_size=96, head_size_v=32), "kv_planes", "K and V have a plane each"),
        (
            FullAttention(block_size=16, head_size=100),
            "rocm_pages",
            "a multiple of 8, the bfloat16 elements of 16 bytes",
        ),
    ],
)
def test_heads_that_a_packing_does_not_take(spec, name, message):
    with pytest.raises(LayoutError, match=message):
        quantize(spec, name)


def test_runs_rise_whatever_the_order_of_the_axes():
    view = StridedView((2, 3, 2), (16, 64, 4), 8, "int32")
    assert list(view.runs()) == [(8 + start, 8) for start in (0, 16, 64, 80, 128, 144)]


@pytest.mark.parametrize("index", [(-1, 0), (0, -1), (2, 0), (0, 3), (0, 1.0), (True, 0), (0,), (0, 0, 0)])
def test_an_index_that_is_none_of_a_view_is_refused(index):
    with pytest.raises(LayoutError, match="index"):
        StridedView((2, 3), (16, 4), 0, "int32").address(*index)


def test_as_many_runs_as_there_may_be_are_listed(monkeypatch):
    monkeypatch.setattr("hkv.layout.strided.MAX_RUNS", 6)
    assert len(list(StridedView((2, 3), (64, 16), 0, "int32").runs())) == 6
    with pytest.raises(LayoutError, match="at most 6 stretches"):
        list(StridedView((2, 3, 2), (64, 16, 8), 0, "int32").runs())

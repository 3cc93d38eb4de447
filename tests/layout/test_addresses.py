"""Addresses: the closed form against a walk through memory, its inverse, its descriptors."""

from __future__ import annotations

import itertools
import pathlib
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.errors import LayoutError
from hkv.layout.block_layout import Layout, Order, Place, StridedView
from hkv.layout.content import QUANTIZATIONS, Part, quantize
from hkv.layout.views import numpy as numpy_views
from hkv.spec import FullAttention, MLAAttention
from hkv.spec.dtypes import item_bytes
from reference.layout import cell_addresses, element_addresses
from tests.layout.geometries import COINCIDENCES, DISTINCT, Case, cases, fixed_case


def walk(case: Case) -> dict:
    return cell_addresses(
        case.spec,
        case.order.value,
        case.num_layers,
        case.num_blocks,
        layer_stride=case.layer_stride,
        block_stride=case.block_stride,
        offset=case.offset,
        kernel_block_size=case.kernel_block_size,
    )


def misaligned(layout: Layout, part: Part) -> bool:
    cell = layout.strides[2:4] if part.strides is None else part.strides
    first = layout.offset + part.offset + (part.first_head * layout.strides[2] if part.strides is None else 0)
    return any(number % item_bytes(part.dtype) for number in (*layout.strides[:2], *cell, first))


def check_against_walk(case: Case) -> None:
    layout, walked = case.layout(), walk(case)
    assert len(set(walked.values())) == len(walked)
    inverse = {address: at for at, address in walked.items()}
    for at, address in walked.items():
        assert layout.address(*at) == address
    for address in range(layout.end + 40):
        found = layout.locate(address)
        assert found == (Place(*inverse[address]) if address in inverse else None)
    assert layout.end == max(walked.values()) + 1


@given(cases())
@settings(max_examples=150)
def test_every_byte_lies_where_a_walk_through_memory_finds_it(case):
    check_against_walk(case)


@pytest.mark.parametrize("order", Order, ids=lambda order: order.value)
@pytest.mark.parametrize("sizes", [{**DISTINCT, "num_blocks": 3, "num_layers": 2, "head_size_v": 5}, *COINCIDENCES])
def test_distinct_and_coinciding_sizes(order, sizes):
    check_against_walk(fixed_case(sizes, order))


@given(cases())
@settings(max_examples=100)
def test_every_element_of_every_part_lies_where_a_writer_puts_it(case):
    layout = case.layout()
    walked = element_addresses(case.spec, walk(case), layout.shape[3])
    known = {key: address for key, address in walked.items() if key[0] != "unused"}
    shapes = {part: layout.part(part).shape for part, *_ in known}
    for part in shapes:
        if misaligned(layout, layout.part(part)):
            with pytest.raises(LayoutError, match=r"multiples? of"):
                layout.part_view(part, 0)
            return
    indices = {part: list(itertools.product(*map(range, shape))) for part, shape in shapes.items()}
    assert len(set(known.values())) == len(known)
    for (part, layer, block, head, state, element, byte), address in known.items():
        index = indices[part][element]
        assert layout.element_address(part, layer, block, head, state, *index) + byte == address
        found = layout.locate_element(address)
        assert found is not None
        assert (found.part, found.layer, found.block, found.head, found.state) == (part, layer, block, head, state)
        assert (found.index, found.byte) == (index, byte)


@given(cases(), st.integers(1, 40))
@settings(max_examples=40)
def test_scaled_geometries_have_scaled_addresses(case, power):
    """Multiplying every stride by a factor multiplies every address by it: nothing overflows on the way."""
    layout = case.layout()
    factor = 2**power
    cells = layout.cells()
    scaled = StridedView(cells.shape, tuple(s * factor for s in cells.strides), cells.offset * factor, "uint8")
    for corner in itertools.product(*((0, extent - 1) for extent in cells.shape)):
        assert scaled.address(*corner) == cells.address(*corner) * factor
        assert scaled.locate(scaled.address(*corner)) == (corner, 0)


def test_alignment_moves_blocks_apart():
    spec = FullAttention(block_size=4, num_kv_heads=2, head_size=3, dtype="float16", block_stride_alignment=64)
    assert Layout.of_spec(spec, "LBNHC", num_blocks=5, num_layers=3).strides == (640, 128, 12, 24, 1)
    assert Layout.of_spec(spec, "BLNHC", num_blocks=5, num_layers=3).strides == (96, 320, 12, 24, 1)


def test_a_repaged_cache_steps_over_the_pages_in_between():
    """A table [0, 2] becomes [0, 1, 2, 3, 10, 11, 12, 13] when a block is five kernel pages long (vLLM 0.33)."""
    spec = MLAAttention(block_size=16, head_size=8, dtype="uint8", tokens_per_state=4)
    packed = Layout.of_spec(spec, "BLNHC", num_blocks=3, block_stride=5 * 8)
    pages = packed.repaged(1)
    assert [row for block in (0, 2) for row in pages.kernel_rows(block)] == [0, 1, 2, 3, 10, 11, 12, 13]
    for block, state in itertools.product(range(3), range(4)):
        assert pages.address(0, block, 0, state) == packed.address(0, block, 0, state)
    assert [pages.locate(byte) for byte in range(pages.end)] == [packed.locate(byte) for byte in range(packed.end)]
    two = Layout.of_spec(spec, "BLNHC", num_blocks=3, num_layers=2, block_stride=10 * 8).repaged(2)
    assert two.locate(two.address(1, 2, 0, 3, 7)) == Place(1, 2, 0, 3, 7)
    with pytest.raises(LayoutError, match="one head and several tokens"):
        Layout.of_spec(FullAttention(block_size=16), "BLNHC", num_blocks=3).repaged(4)
    with pytest.raises(LayoutError, match="whose page divides"):
        Layout.of_spec(spec, "BLNHC", num_blocks=3, block_stride=5 * 8 + 4).repaged(2)


def test_tokens_and_states():
    compressed = MLAAttention(block_size=16, head_size=8, dtype="uint8", tokens_per_state=4)
    layout = Layout.of_spec(compressed, "LBNHC", num_blocks=2)
    assert [layout.states_of(token) for token in (0, 3, 4, 15)] == [range(0, 1), range(0, 1), range(1, 2), range(3, 4)]
    with pytest.raises(LayoutError, match="from 0 to 15"):
        layout.states_of(16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"order": "LNBHC"}, "layout = 'LNBHC': expected one of LBHNC"),
        ({"num_blocks": 0}, "num_blocks = 0"),
        ({"num_layers": -1}, "num_layers = -1"),
        ({"kernel_block_size": 3}, "a divisor of block_size 4"),
        ({"order": "BLNHC", "kernel_block_size": 2}, "BLNHC puts blocks 288 bytes apart"),
        ({"order": "LHBNC", "kernel_block_size": 2}, "LHBNC puts blocks 48 bytes apart"),
        ({"block_stride": 90}, "expected to nest"),
        ({"layer_stride": 0}, "L stride = 0"),
        ({"offset": -1}, "offset = -1"),
        ({"page_size_padded": 256, "order": "LHBNC"}, "scatters a page of 2 heads"),
        ({"page_size_padded": 256, "order": "BHLNC"}, "scatters a page of 2 heads"),
        ({"page_size_padded": 128, "kernel_block_size": 2}, "padded pages cannot be split"),
        ({"block_stride_alignment": 64, "order": "LHBNC"}, "aligned to 64 bytes"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(arguments, message):
    padding = {name: arguments[name] for name in arguments if name.startswith(("page", "block_stride_"))}
    spec = FullAttention(block_size=4, num_kv_heads=2, head_size=3, dtype="float16", **padding)
    asked = {name: arguments[name] for name in arguments if name not in padding}
    with pytest.raises(LayoutError, match=message):
        Layout.of_spec(spec, **{"order": "LBNHC", "num_blocks": 5, "num_layers": 3, **asked})


def test_out_of_range_coordinates_never_wrap():
    spec = FullAttention(block_size=4, num_kv_heads=2, head_size=3, dtype="float16")
    layout = Layout.of_spec(spec, "LBNHC", num_blocks=5, num_layers=3)
    good = [0, 0, 0, 0, 0]
    for axis, limit in enumerate((3, 5, 2, 4, 12)):
        for value in (-1, limit):
            at = [*good]
            at[axis] = value
            with pytest.raises(LayoutError, match=f"= {value}: expected a number from 0 to {limit - 1}"):
                layout.address(*at)


def test_planes_want_a_page_without_gaps():
    spec = quantize(FullAttention(block_size=4, num_kv_heads=2, head_size=16, dtype="bfloat16"), "nvfp4")
    Layout.of_spec(spec, "LBHNC", num_blocks=2).part_view("key_scale", 0)
    with pytest.raises(LayoutError, match="key_scale is a plane of the page"):
        Layout.of_spec(spec, "LBNHC", num_blocks=2).part_view("key_scale", 0)


def test_misaligned_scales_are_refused_by_name():
    spec = quantize(FullAttention(block_size=4, num_kv_heads=1, head_size=6, dtype="bfloat16"), "int8_per_token_head")
    with pytest.raises(LayoutError, match="a multiple of 4, the bytes of one float32"):
        Layout.of_spec(spec, "LBNHC", num_blocks=2).part_view("key_scale", 0)


# The examples of docs/layouts.md.


TEXT = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "layouts.md").read_text()


@pytest.fixture
def names() -> dict:
    code, *_ = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names: dict = {}
    exec(code, names)
    return names


def test_the_example(names):
    layout = names["layout"]
    assert isinstance(layout, Layout)
    assert layout.strides == (96, 288, 48, 12, 1)
    assert layout.address(2, 4, 1, 3, byte=11) == 1439
    assert layout.locate(1439) == Place(2, 4, 1, 3, 11)
    assert layout.element_address("value", 2, 4, 1, 3, 2) == 1438


def test_the_table_of_strides():
    spec = FullAttention(block_size=4, num_kv_heads=2, head_size=3, dtype="float16")
    rows = dict(re.findall(r"^\| ([LBHNC]{5}) \| \w* ?\| ([\d |]+?) \| one run", TEXT, re.MULTILINE))
    assert {name: tuple(map(int, row.split(" | "))) for name, row in rows.items()} == {
        order.value: Layout.of_spec(spec, order, num_blocks=5, num_layers=3).strides for order in Order
    }


def test_every_packing_is_in_the_table():
    for name in QUANTIZATIONS:
        assert f"`{name}`" in TEXT or name in ("int8_per_token_head", "fp8_per_token_head", "fp8_per_tensor")


# The query whether tokens flatten without a copy, against NumPy, which copies only where it must.


def flattens(layout: Layout) -> bool:
    """True if NumPy makes one axis of blocks, kernel blocks and states without a copy."""
    bytes_of = layout.cells()
    pool = np.zeros(bytes_of.end, np.uint8)
    layer = numpy_views.view(pool, bytes_of)[0]
    tokens = layer.transpose(0, 1, 3, 2, 4)
    flat = tokens.reshape(layout.num_blocks * layout.split * layout.shape[3], *tokens.shape[3:])
    return np.shares_memory(flat, pool)


@given(cases())
def test_drawn_layouts(case: Case) -> None:
    layout = case.layout()
    assert layout.tokens_flatten == flattens(layout)

"""Jitted transfers against the address map: formats, geometries, skips, paddings and bad ids, bit for bit."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference.chunks.transfer as reference
from hkv.chunks.formats import SCALE_BYTES, TRAITS, EngineKVFormat, num_tensors
from hkv.chunks.kernel_groups import PageGeometry
from hkv.chunks.objects import Region
from hkv.chunks.transfer import Transfer, pack, unpack
from hkv.errors import LayoutError, OperationError

F = EngineKVFormat
KERNEL_FORMATS = [found for found in F if TRAITS[found].kernel]
POISON = 0xA5


@st.composite
def cases(draw):
    """A geometry, its region inside a larger object, and arguments of one call; from a small set of static shapes."""
    found = draw(st.sampled_from(KERNEL_FORMATS))
    traits = TRAITS[found]
    # Three objects where all sizes differ, one where they coincide: each geometry is one program.
    layers, blocks, slots, heads, size, dtype = draw(
        st.sampled_from([(2, 5, 3, 4, 6, "bfloat16"), (1, 2, 2, 2, 2, "float32")])
    )
    if found is F.NL_X_NB_BSV_BSS:
        heads, size, dtype = 1, 12 + SCALE_BYTES, "uint8"
    if traits.mla:
        heads = 1
    padded = traits.padded_blocks and draw(st.booleans())
    stride = slots * heads * size + 10 if padded else 0
    geometry = PageGeometry(found, traits.kv_size, layers, blocks, slots, heads, size, dtype, stride)
    per_object = 2
    count = (3 if layers > 1 else 1) * per_object
    rows = per_object * slots
    nbytes = geometry.kv_size * layers * rows * geometry.row_bytes
    region = Region(0, 22, rows, (geometry.kv_size, layers, rows, heads * size), dtype, nbytes)
    ids = draw(st.lists(st.sampled_from([*range(blocks), -1, -7, blocks, 2**31 - 1]), min_size=count, max_size=count))
    skip = draw(st.integers(-1, count + 1))
    return geometry, region, ids, skip, draw(st.integers(0, 2**32 - 1))


def arrays_of(geometry, region, ids, seed):
    generator = np.random.default_rng(seed)
    count = num_tensors(TRAITS[geometry.format].structure, geometry.num_layers)
    shape = (geometry.pages_per_tensor, geometry.page_stride_bytes)
    tensors = [generator.integers(0, 256, shape, dtype=np.uint8) for _ in range(count)]
    objects = generator.integers(0, 256, (len(ids) // 2, region.offset + region.nbytes + 7), dtype=np.uint8)
    return tensors, objects


def without_repeats(ids):
    """Ids with repeats left out, for the object that a repeated id ends up with is undefined."""
    return [block if block not in ids[:position] else -1 for position, block in enumerate(ids)]


@given(cases())
def test_pack_equals_the_address_map(case):
    geometry, region, ids, skip, seed = case
    tensors, objects = arrays_of(geometry, region, ids, seed)
    expected = objects.copy()
    dropped = reference.pack(geometry, region, tensors, expected, ids, max(skip, 0))
    got, count = pack(
        Transfer(geometry, region), tuple(tensors), objects.copy(), np.array(ids, np.int32), np.int32(skip)
    )
    assert np.array_equal(np.asarray(got), expected)
    assert int(count) == dropped


@given(cases())
def test_unpack_equals_the_address_map(case):
    geometry, region, ids, skip, seed = case
    ids = without_repeats(ids)
    tensors, objects = arrays_of(geometry, region, ids, seed)
    expected = [tensor.copy() for tensor in tensors]
    dropped = reference.unpack(geometry, region, expected, objects, ids, max(skip, 0))
    arrays = tuple(tensor.copy() for tensor in tensors)
    got, count = unpack(Transfer(geometry, region), arrays, objects, np.array(ids, np.int32), np.int32(skip))
    for array, wanted in zip(got, expected, strict=True):
        assert np.array_equal(np.asarray(array), wanted)
    assert int(count) == dropped


@pytest.mark.parametrize("fmt", [1, 2, 4, 9, 0])
def test_layouts_of_the_same_values_make_the_same_object(fmt):
    """Store with one layout, retrieve with another: K and V planes of the same logical values."""
    layers, blocks, slots, heads, size = 2, 4, 3, 2, 8
    logical = np.random.default_rng(0).integers(0, 256, (2, layers, blocks, slots, heads, size), dtype=np.uint8)
    geometry = PageGeometry(F(fmt), 2, layers, blocks, slots, heads, size, "uint8")
    region = Region(0, 0, blocks * slots, (2, layers, blocks * slots, heads * size), "uint8", logical.size)
    pages = {
        0: [logical.transpose(2, 1, 0, 3, 4, 5)],
        1: [logical[:, layer] for layer in range(layers)],
        2: [logical[:, layer].swapaxes(0, 1) for layer in range(layers)],
        4: [logical[plane, layer] for plane in range(2) for layer in range(layers)],
        9: [logical[plane, layer] for plane in range(2) for layer in range(layers)],
    }[fmt]
    tensors = tuple(np.ascontiguousarray(page).reshape(geometry.pages_per_tensor, -1) for page in pages)
    ids = np.array([2, 0, 3, 1], np.int32)
    made, _ = pack(Transfer(geometry, region), tensors, np.zeros((1, logical.size), np.uint8), ids, np.int32(0))
    assert np.array_equal(np.asarray(made)[0], logical[:, :, [2, 0, 3, 1]].reshape(-1))


def test_pages_are_written_in_place():
    geometry = PageGeometry(F(3), 1, 1, 4096, 16, 1, 576, "bfloat16")
    region = Region(0, 0, 32, (1, 1, 32, 576), "bfloat16", 32 * 576 * 2)
    pool = jax.ShapeDtypeStruct((4096, geometry.page_bytes), np.uint8)
    objects = jax.ShapeDtypeStruct((1, region.nbytes), np.uint8)
    ids = np.array([1, 2], np.int32)
    compiled = unpack.lower(Transfer(geometry, region), (pool,), objects, ids, np.int32(0)).compile()
    copies = [
        line
        for line in compiled.as_text().splitlines()
        if " copy(" in line and f"u8[4096,{geometry.page_bytes}]" in line
    ]
    assert copies == []
    assert "input_output_alias" in compiled.as_text()


def geometry_of(**changes):
    fields = {
        "format": F(3),
        "kv_size": 1,
        "num_layers": 1,
        "num_blocks": 4,
        "slots": 2,
        "num_heads": 1,
        "head_size": 8,
    }
    return PageGeometry(**{**fields, "dtype": "uint8", **changes})


def region_of(rows=4, row=8):
    return Region(0, 0, rows, (1, 1, rows, row), "uint8", rows * row)


@pytest.mark.parametrize(
    ("geometry", "region", "match"),
    [
        (geometry_of(format=F(16)), region_of(), "format"),
        (geometry_of(num_heads=33), region_of(), "num_heads = 33"),
        (geometry_of(head_size=7), region_of(), "head_bytes = 7"),
        (geometry_of(format=F(14), head_size=6), region_of(), "head_bytes = 6"),
        (geometry_of(), region_of(3), "slots = 3"),
    ],
)
def test_what_the_kernel_cannot_move_is_refused(geometry, region, match):
    with pytest.raises(LayoutError, match=match):
        Transfer(geometry, region)


@pytest.mark.parametrize(
    ("shape", "objects", "ids", "skip", "match"),
    [
        ((4, 16), 1, [0, 4], 0, "block_ids = 4"),
        ((4, 16), 1, [0, -1], 0, "block_ids = -1"),
        ((4, 16), 1, [0], 0, "block_ids = 1"),
        ((4, 16), 5, [0] * 10, 0, "objects = 5"),
        ((4, 16), 0, [], 0, "objects = 0"),
        ((4, 16), 1, [0, 1], -1, "skip = -1"),
        ((5, 16), 1, [0, 1], 0, "tensors"),
    ],
)
def test_a_host_call_names_what_is_wrong(shape, objects, ids, skip, match):
    transfer = Transfer(geometry_of(), region_of())
    with pytest.raises(OperationError, match=match):
        transfer.check_call([np.zeros(shape, np.uint8)], np.zeros((objects, 32), np.uint8), ids, skip)

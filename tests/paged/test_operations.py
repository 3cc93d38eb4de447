"""Jitted page movement against the loops over elements, bit for bit, over layouts, dtypes, splits and bad ids."""

# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false
# (NumPy arrays stand for JAX's)

from __future__ import annotations

import itertools
import re

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reference.paged.operations as reference
from hkv import paged
from hkv.errors import ConfigError, LayoutError
from hkv.layout.block_layout import Layout, Order
from hkv.layout.content import quantize
from hkv.layout.views.numpy import numpy_dtype
from hkv.paged.operations import kernel_blocks
from hkv.spec import FullAttention, Mamba, MLAAttention


def attention(**changes):
    return FullAttention(**{"block_size": 4, "num_kv_heads": 3, "head_size": 5, "head_size_v": 2, **changes})


LAYOUTS = {
    **{
        f"{order.value}, all sizes different": Layout.of_spec(attention(), order, num_blocks=7, num_layers=2)
        for order in Order
    },
    "everything two": Layout.of_spec(
        attention(block_size=2, num_kv_heads=2, head_size=2, head_size_v=2, dtype="uint8"),
        "BLHNC",
        num_blocks=2,
        num_layers=2,
    ),
    "one head, float32": Layout.of_spec(attention(num_kv_heads=1, dtype="float32"), "LBNHC", num_blocks=5),
    "padded pages": Layout.of_spec(attention(page_size_padded=256), "BLNHC", num_blocks=5, num_layers=2),
    "offset and foreign bytes": Layout.of_spec(
        attention(dtype="float16"), "BLHNC", num_blocks=4, num_layers=2, layer_stride=200, block_stride=504, offset=40
    ),
    "kernel split": Layout.of_spec(attention(), "LBHNC", num_blocks=5, num_layers=2, kernel_block_size=2),
    "float8": Layout.of_spec(attention(dtype="float8_e4m3fn"), "LBNHC", num_blocks=5),
    "int8 and scales": Layout.of_spec(
        quantize(attention(head_size=4, head_size_v=4), "int8_per_token_head"), "LBNHC", num_blocks=5
    ),
    "vectors of a ROCm kernel": Layout.of_spec(
        quantize(attention(head_size=16, head_size_v=16), "rocm_pages"), "LHBNC", num_blocks=5, num_layers=2
    ),
    "latent of 576": Layout.of_spec(MLAAttention(block_size=2, head_size=576), "LBNHC", num_blocks=4),
    "656 bytes": Layout.of_spec(
        quantize(MLAAttention(block_size=2, head_size=576), "fp8_ds_mla"), "LBNHC", num_blocks=4
    ),
    "indexer": Layout.of_spec(
        quantize(MLAAttention(block_size=3, head_size=128, dtype="uint8"), "fp8_indexer"),
        "BLNHC",
        num_blocks=4,
        num_layers=2,
    ),
    "states": Layout.of_spec(
        Mamba(block_size=4, shapes=((3, 4), (2, 5)), dtypes=("float32", "bfloat16"), page_size_padded=80),
        "LBNHC",
        num_blocks=5,
    ),
}
PADDING = 24


def pool_of(layout, seed):
    """Random bytes, NaN payloads among them, and some more behind the cache, so that a stray write shows."""
    size = -(-layout.end // 8) * 8 + PADDING
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def values_of(layout, count, seed, names=None):
    generator = np.random.default_rng(seed)
    found = {}
    for part in layout.content:
        if names is not None and part.name not in names:
            continue
        heads = layout.shape[2] if part.heads is None else part.heads
        dtype = numpy_dtype(part.dtype)
        raw = generator.integers(
            0, 256, (count, heads, *part.shape[:-1], part.shape[-1] * dtype.itemsize), dtype=np.uint8
        )
        found[part.name] = raw.view(dtype)
    return found


def bits(array):
    return np.asarray(array).tobytes()


layouts = st.sampled_from(sorted(LAYOUTS)).map(LAYOUTS.get)
seeds = st.integers(0, 2**32 - 1)


def ids_of(layout, count):
    """Mostly real ids, some that are not; none twice among those that exist."""
    wrong = st.sampled_from([-1, -2, layout.num_blocks, layout.num_blocks + 1, 2**31 - 1, -(2**31)])
    real = st.permutations(range(layout.num_blocks))
    flags = st.lists(st.integers(0, 9), min_size=count, max_size=count)
    return st.tuples(real, flags, st.lists(wrong, min_size=count, max_size=count)).map(
        lambda drawn: [drawn[0][i] if i < layout.num_blocks and drawn[1][i] < 7 else drawn[2][i] for i in range(count)]
    )


def slots_of(layout, count, draw):
    """Layer, blocks and states of tokens: mostly real slots, none of them twice, and some that are not."""
    slots = draw.permutation(layout.num_blocks * layout.states_per_block)
    blocks, states = divmod(np.resize(slots, count), layout.states_per_block)
    outside = draw.random(count) < 0.3
    outside[slots.size :] = True
    blocks[outside] = draw.choice([-1, -2, layout.num_blocks, 2**31 - 1], outside.sum())
    beyond = ~outside & (draw.random(count) < 0.2)
    states[beyond] = draw.choice([-1, layout.states_per_block, 2**31 - 1], beyond.sum())
    layers = [*range(layout.num_layers)] * 4 + [layout.num_layers, -1]
    return int(draw.choice(layers)), blocks.tolist(), states.tolist()


def test_write():
    """Drawn by NumPy: of a hundred of Hypothesis's examples half were the same, and few had a state outside."""
    for layout, seed in itertools.product(LAYOUTS.values(), range(12)):
        layer, blocks, states = slots_of(layout, 5, np.random.default_rng(seed))
        values = values_of(layout, len(blocks), seed)
        expected = pool_of(layout, seed)
        got, dropped = paged.write(expected.copy(), layout, np.int32(layer), np.int32(blocks), np.int32(states), values)
        assert int(dropped) == reference.write(expected, layout, layer, blocks, states, values), layout
        assert bits(got) == bits(expected), layout


@given(st.data(), layouts, seeds)
@settings(max_examples=20)
def test_write_of_one_part_leaves_the_others(data, layout, seed):
    name = data.draw(st.sampled_from([part.name for part in layout.content]))
    values = values_of(layout, 1, seed, {name})
    expected = pool_of(layout, seed)
    got, _ = paged.write(expected.copy(), layout, np.int32(0), np.int32([1]), np.int32([0]), values)
    reference.write(expected, layout, 0, [1], [0], values)
    assert bits(got) == bits(expected)


@given(st.data(), layouts, seeds, st.sampled_from([0, -1]))
def test_gather(data, layout, seed, null_block):
    table = data.draw(st.lists(st.integers(-2, layout.num_blocks), min_size=4, max_size=4))
    pool = pool_of(layout, seed)
    got, dropped = paged.gather(pool, layout, np.int32(0), np.int32(table), null_block=null_block)
    dtypes = {part.name: numpy_dtype(part.dtype) for part in layout.content}
    expected, missing = reference.gather(pool, layout, 0, table, dtypes, null_block)
    assert {name: bits(content) for name, content in got.items()} == {name: bits(c) for name, c in expected.items()}
    assert {name: content.shape for name, content in got.items()} == {name: c.shape for name, c in expected.items()}
    assert int(dropped) == missing


@given(st.data(), layouts, seeds, st.sampled_from([0, -1]))
def test_scatter(data, layout, seed, null_block):
    table = data.draw(ids_of(layout, 3))
    values = values_of(layout, 3 * layout.states_per_block, seed)
    expected = pool_of(layout, seed)
    got, dropped = paged.scatter(expected.copy(), layout, np.int32(0), np.int32(table), values, null_block=null_block)
    assert int(dropped) == reference.scatter(expected, layout, 0, table, values, null_block)
    assert bits(got) == bits(expected)


@given(st.data(), layouts, seeds)
def test_copy_blocks(data, layout, seed):
    sources = data.draw(st.lists(st.integers(-2, layout.num_blocks), min_size=3, max_size=3))
    targets = data.draw(ids_of(layout, 3))
    expected = pool_of(layout, seed)
    got, dropped = paged.copy_blocks(expected.copy(), layout, np.int32(sources), np.int32(targets))
    assert int(dropped) == reference.copy_blocks(expected, layout, sources, targets)
    assert bits(got) == bits(expected)


@given(st.data(), layouts, seeds)
def test_zero_blocks(data, layout, seed):
    blocks = data.draw(st.lists(st.integers(-2, layout.num_blocks), min_size=3, max_size=3))
    expected = pool_of(layout, seed)
    got, dropped = paged.zero_blocks(expected.copy(), layout, np.int32(blocks))
    assert int(dropped) == reference.zero_blocks(expected, layout, blocks)
    assert bits(got) == bits(expected)


@given(seeds)
@settings(max_examples=10)
def test_kernel_blocks_are_the_same_bytes(seed):
    layout = LAYOUTS["kernel split"]
    kernel = kernel_blocks(layout)
    pool = pool_of(layout, seed)
    table = np.int32([3, 1])
    whole, _ = paged.gather(pool, layout, np.int32(1), table)
    rows = np.int32([row for block in table for row in layout.kernel_rows(int(block))])
    pieces, _ = paged.gather(pool, kernel, np.int32(1), rows, null_block=-1)
    assert {name: bits(content) for name, content in whole.items()} == {name: bits(c) for name, c in pieces.items()}


OPERATIONS = {
    "write": lambda pool, layout: paged.write.lower(
        pool, layout, np.int32(0), np.int32([1, 2]), np.int32([0, 1]), values_of(layout, 2, 0)
    ),
    "scatter": lambda pool, layout: paged.scatter.lower(
        pool, layout, np.int32(0), np.int32([1, 2]), values_of(layout, 2 * layout.states_per_block, 0)
    ),
    "copy_blocks": lambda pool, layout: paged.copy_blocks.lower(pool, layout, np.int32([1, 2]), np.int32([2, 3])),
    "zero_blocks": lambda pool, layout: paged.zero_blocks.lower(pool, layout, np.int32([1, 2])),
}


def copies_of(text, elements):
    """Copy operations in optimised HLO whose result has that many elements."""
    sizes = re.findall(r"= \w+\[([\d,]*)\]\S* copy\(", text)
    return [size for size in sizes if np.prod([int(n) for n in size.split(",") if n], initial=1) == elements]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("order", ["LBNHC", "LHBNC", "BLHNC"])
def test_a_donated_pool_is_never_copied(operation, order):
    layout = Layout.of_spec(attention(block_size=16, num_kv_heads=2, head_size=8), order, num_blocks=512, num_layers=2)
    pool = jax.ShapeDtypeStruct((layout.end,), np.uint8)
    text = OPERATIONS[operation](pool, layout).compile().as_text()
    assert copies_of(text, layout.end) == []
    assert "input_output_alias" in text


def test_the_search_for_copies_finds_one():
    """Without donation the pool has to be copied: the search must see it."""
    layout = Layout.of_spec(attention(block_size=16), "LBNHC", num_blocks=512)
    pool = jax.ShapeDtypeStruct((layout.end,), np.uint8)
    undonated = jax.jit(lambda pool: paged.zero_blocks.__wrapped__(pool, layout, np.int32([1, 2])))
    assert copies_of(undonated.lower(pool).compile().as_text(), layout.end) != []


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda values: {"latent": values["key"]}, "part = 'latent'"),
        (lambda values: {"key": values["key"][:, :2]}, "values"),
        (lambda values: {"key": values["key"].astype(np.float32)}, "values"),
    ],
)
def test_values_that_do_not_fit_are_refused(change, match):
    layout = LAYOUTS["LBNHC, all sizes different"]
    values = change(values_of(layout, 1, 0))
    with pytest.raises(LayoutError, match=match):
        paged.write(np.zeros(layout.end, np.uint8), layout, np.int32(0), np.int32([0]), np.int32([0]), values)


@pytest.mark.parametrize("pool", [np.zeros((4, 4), np.uint8), np.zeros(100_000, bool), np.zeros(16, np.complex64)])
def test_a_pool_that_cannot_be_one_is_refused(pool):
    with pytest.raises(LayoutError, match="buffer"):
        paged.zero_blocks(pool, LAYOUTS["latent of 576"], np.int32([0]))


def test_an_unknown_implementation_is_named():
    layout = LAYOUTS["latent of 576"]
    with pytest.raises(ConfigError, match="implementation = 'magic'"):
        paged.zero_blocks(np.zeros(layout.end, np.uint8), layout, np.int32([0]), implementation="magic")

"""Pools of more rows than 32 bits count: runs by page and row in it, against the loops over elements."""

from __future__ import annotations

import contextlib
from unittest import mock

import jax
import numpy as np
import pytest

import reference.paged.operations as reference
from hkv import paged
from hkv.errors import ConfigError, LayoutError
from hkv.layout.block_layout import Layout
from hkv.layout.content import quantize
from hkv.layout.views import jax as blocks_of
from hkv.layout.views import runs
from hkv.layout.views.numpy import numpy_dtype
from hkv.layout.views.runs import runs_of
from hkv.paged import plan
from hkv.spec import FullAttention, MLAAttention
from tests.paged.test_operations import bits, copies_of, values_of

LATENT, INDEXER = MLAAttention(block_size=2, head_size=576), MLAAttention(block_size=3, head_size=128, dtype="uint8")
HEADS = FullAttention(block_size=4, num_kv_heads=3, head_size=5, head_size_v=2)
LAYOUTS = {
    "656 bytes": Layout.of_spec(quantize(LATENT, "fp8_ds_mla"), "LBNHC", num_blocks=9, num_layers=2),
    "indexer": Layout.of_spec(quantize(INDEXER, "fp8_indexer"), "LBNHC", num_blocks=11, num_layers=2),
    "layers in a block": Layout.of_spec(HEADS, "BLHNC", num_blocks=13, num_layers=2),
}
"""Layouts that no other test has: what is traced under a smaller limit is kept."""
BAD = [-1, -2, 100, 2**31 - 1, -(2**31)]


@contextlib.contextmanager
def small_numbers(shown):
    """A limit for which the layout has too many rows."""
    buffer = jax.ShapeDtypeStruct((shown.end,), np.uint8)
    views = [plan.part_view(shown, part.name) for part in shown.content]
    found = [runs_of(buffer, view, count) for view in views for count in (plan.BLOCK, plan.TOKEN)]
    limit = max(shown.num_layers * shown.num_blocks, *(each.steps[1] for each in found)) + 1
    with mock.patch.object(runs, "ROW_LIMIT", limit):
        yield


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS)
def layout(request):
    with small_numbers(request.param):
        yield request.param


def pool_of(layout):
    return np.random.default_rng(3).integers(0, 256, layout.end, dtype=np.uint8)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_operation_is_what_the_loops_are(name):
    check_every_operation(name)


def check_every_operation(name):
    """Every operation, one after the other, on one pool."""
    with small_numbers(LAYOUTS[name]):
        check_operations(LAYOUTS[name])


def check_operations(layout):
    buffer = jax.ShapeDtypeStruct((layout.end,), np.uint8)
    assert all(runs_of(buffer, plan.part_view(layout, part.name), plan.BLOCK).page for part in layout.content)
    expected = pool_of(layout)
    pool = expected.copy()

    blocks, states = [*BAD, 8, 3, 1], [0, 1, 0, 1, 0, 1, 0, 9]
    values = values_of(layout, len(blocks), 1)
    pool, dropped = paged.write(pool, layout, np.int32(1), np.int32(blocks), np.int32(states), values)
    assert int(dropped) == reference.write(expected, layout, 1, blocks, states, values)
    assert bits(pool) == bits(expected)

    table = [7, *BAD, 2]
    values = values_of(layout, len(table) * layout.states_per_block, 2)
    pool, dropped = paged.scatter(pool, layout, np.int32(0), np.int32(table), values)
    assert int(dropped) == reference.scatter(expected, layout, 0, table, values)
    assert bits(pool) == bits(expected)

    sources, targets = [1, 2, -1, 100, 5, 8], [2, 1, 3, 4, 100, 7]
    pool, dropped = paged.copy_blocks(pool, layout, np.int32(sources), np.int32(targets))
    assert int(dropped) == reference.copy_blocks(expected, layout, sources, targets)
    assert bits(pool) == bits(expected)
    pool, _ = paged.copy_blocks(pool, layout, np.int32([1, 100]), np.int32([6, 7]), disjoint=True)
    reference.copy_blocks(expected, layout, [1, 100], [6, 7])
    assert bits(pool) == bits(expected)

    pool, dropped = paged.zero_blocks(pool, layout, np.int32([4, 4, *BAD]))
    assert int(dropped) == reference.zero_blocks(expected, layout, [4, 4, *BAD])
    assert bits(pool) == bits(expected)

    dtypes = {part.name: numpy_dtype(part.dtype) for part in layout.content}
    found, _ = paged.gather(pool, layout, np.int32(1), np.int32(table))
    wanted, _ = reference.gather(expected, layout, 1, table, dtypes)
    assert {name: bits(content) for name, content in found.items()} == {name: bits(c) for name, c in wanted.items()}

    view = layout.layer_view(1)

    @jax.jit
    def moved(pool):
        shown = blocks_of.read_blocks(pool, view, np.int32([8, 100]))
        written = blocks_of.write_blocks(pool, view, np.int32([5, 100]), shown)
        return shown[:1], blocks_of.read_blocks(written, view, np.int32([5]))

    shown, again = moved(pool)
    assert bits(again) == bits(shown)


def test_no_pool_is_copied(layout):
    buffer = jax.ShapeDtypeStruct((layout.end,), np.uint8)
    values = values_of(layout, 2, 0)
    lowered = paged.write.lower(buffer, layout, np.int32(0), np.int32([1, 2]), np.int32([0, 1]), values)
    assert copies_of(lowered.compile().as_text(), layout.end) == []


def test_kernels_refuse_and_auto_takes_xla(layout):
    buffer = jax.ShapeDtypeStruct((layout.end,), np.uint8)
    chosen = paged.implementations_of(buffer, layout, "auto")
    assert set(chosen["gather"].values()) == {"xla"}
    with pytest.raises(ConfigError, match=r"'pallas_triton:interpret': expected xla for a pool of more than"):
        paged.implementations_of(buffer, layout, "pallas_triton:interpret")


def test_a_pool_that_has_no_pages_is_refused(layout):
    buffer = jax.ShapeDtypeStruct((layout.end + 12,), np.uint8)
    with pytest.raises(LayoutError, match=r"buffer = .*: expected at most \d+ rows of"):
        runs_of(buffer, plan.part_view(layout, layout.content[0].name), plan.BLOCK)


def test_a_pool_of_160_gb_is_gathered_part_by_part():
    """Nothing is allocated: the program is made, and its starts have two numbers."""
    spec = quantize(MLAAttention(block_size=64, head_size=576), "fp8_ds_mla")
    layout = Layout.of_spec(spec, "LBNHC", num_blocks=1 << 16, num_layers=61)
    buffer = jax.ShapeDtypeStruct((layout.end,), np.uint8)
    assert layout.end > 160e9
    found, _ = jax.eval_shape(lambda pool, table: paged.gather(pool, layout, 0, table), buffer, np.zeros(4, np.int32))
    assert {name: content.shape[0] for name, content in found.items()} == dict.fromkeys(found, 256)
    text = paged.gather.lower(buffer, layout, np.int32(0), np.zeros(4, np.int32)).as_text()
    assert "start_index_map = [0, 1]" in text

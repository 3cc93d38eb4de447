"""Legal orders, the one that is chosen, kernel block sizes that suit every kernel; strides and views against vLLM's."""

# pyright: reportMissingImports=false, reportArgumentType=false

from __future__ import annotations

import collections
import importlib
import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.compare_layouts import OUTCOMES, outcome
from benchmarks.installed_layouts import InstalledLayouts, random_cases
from hkv.errors import LayoutError
from hkv.layout.block_layout import Layout, Order
from hkv.layout.content import quantize
from hkv.layout.orders import DEFAULT_PREFERENCE, check_groups, legal_orders, resolve
from hkv.layout.strided import StridedView
from hkv.layout.views.numpy import numpy_dtype, view
from hkv.spec import FullAttention, Mamba, SlidingWindow

COMPACT = (Order.LBNHC, Order.LBHNC, Order.BLNHC, Order.BLHNC)
SMALL = FullAttention(block_size=16, num_kv_heads=2, head_size=64)
LARGE = FullAttention(block_size=16, num_kv_heads=8, head_size=64)


def test_what_each_order_is():
    facts = {o.value: (o.layer_compact, o.block_outermost, o.block_compact, o.alias) for o in Order}
    assert facts == {
        "LBHNC": (True, False, True, "HND"),
        "LBNHC": (True, False, True, "NHD"),
        "LHBNC": (True, False, False, None),
        "BLHNC": (False, True, True, None),
        "BLNHC": (False, True, True, None),
        "BHLNC": (False, True, False, None),
    }
    assert (Order.parse("NHD"), Order.parse("HND")) == (Order.LBNHC, Order.LBHNC)
    assert all(order.axes[-1] == 4 and sorted(order.axes) == [0, 1, 2, 3, 4] for order in Order)


def test_mixed_shapes_need_pages_in_one_run():
    assert legal_orders([SMALL, SMALL]) == DEFAULT_PREFERENCE
    assert legal_orders([SMALL, LARGE]) == COMPACT
    same_page = SlidingWindow(block_size=8, num_kv_heads=4, head_size=64, window=64)
    assert same_page.page_size_bytes == SMALL.page_size_bytes
    assert legal_orders([SMALL, same_page]) == COMPACT
    with pytest.raises(LayoutError, match="block-compact order"):
        legal_orders([SMALL, LARGE], (Order.LHBNC, Order.BHLNC))


def test_context_parallel_and_replicated_layers_need_blocks_outermost():
    sharded = FullAttention(block_size=16, num_kv_heads=2, head_size=64, cp_sharded=True)
    assert legal_orders([sharded, LARGE]) == (Order.BLNHC, Order.BLHNC)
    assert legal_orders([sharded, SMALL]) == DEFAULT_PREFERENCE
    assert legal_orders([sharded, sharded, Mamba(block_size=16)]) == COMPACT
    with pytest.raises(LayoutError, match="blocks outermost"):
        legal_orders([sharded, LARGE], COMPACT[:2])


@pytest.mark.parametrize(
    ("wishes", "order", "source"),
    [
        ({}, Order.LBNHC, "backends"),
        ({"connector": "HND"}, Order.LBHNC, "connector"),
        ({"connector": "HND", "environment": "BLNHC"}, Order.BLNHC, "environment"),
        ({"connector": "HND", "environment": "BLNHC", "explicit": "BHLNC"}, Order.BHLNC, "explicit"),
    ],
)
def test_who_decides(wishes, order, source):
    resolution = resolve([SMALL], **wishes)
    assert (resolution.order, resolution.source, resolution.note) == (order, source, "")


def test_wishes_that_are_not_legal():
    granted = resolve([SMALL, LARGE], connector="LHBNC")
    assert (granted.order, granted.source) == (Order.LBNHC, "backends")
    assert "LHBNC, which is none of LBNHC" in granted.note
    with pytest.raises(LayoutError, match="VLLM_KV_CACHE_LAYOUT = 'LHBNC': expected one of LBNHC"):
        resolve([SMALL, LARGE], environment="LHBNC")
    assert resolve([SMALL, LARGE], explicit="LHBNC").order is Order.LHBNC
    for wish in ("explicit", "environment", "connector"):
        with pytest.raises(LayoutError, match="layout = 'NCHW'"):
            resolve([SMALL], **{wish: "NCHW"})


def test_groups_of_mixed_pages():
    for order in Order:
        check_groups(order, [[SMALL], [SMALL, SMALL]])
    for order, groups in itertools.product(Order, ([[SMALL, LARGE]], [[SMALL], [LARGE]])):
        good = order.block_compact and (len(groups) == 1 or order.block_outermost)
        if good:
            check_groups(order, groups)
        else:
            with pytest.raises(LayoutError, match="as pages have"):
                check_groups(order, groups)


@pytest.mark.parametrize("order", Order, ids=lambda order: order.value)
def test_only_dense_blocks_are_split(order):
    """A block of several heads is dense in LBHNC and LBNHC, and where a block holds a single layer."""
    spec = FullAttention(block_size=4, num_kv_heads=2, head_size=3)
    for layers in (1, 2):
        dense = order in (Order.LBHNC, Order.LBNHC) or (layers == 1 and order.block_compact)
        if dense:
            assert Layout.of_spec(spec, order, num_blocks=3, num_layers=layers, kernel_block_size=2).split == 2
        else:
            with pytest.raises(LayoutError, match="only dense pages"):
                Layout.of_spec(spec, order, num_blocks=3, num_layers=layers, kernel_block_size=2)


# vLLM's ROCm pages against reshaped buffers, and against the views that an installed vLLM makes.


DTYPES = st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"])


def rocm_views(blocks: int, heads: int, tokens: int, size: int, dtype: str) -> tuple[StridedView, StridedView]:
    """Keys and values as the kernels see them, of one layer: all keys before all values."""
    spec = FullAttention(block_size=tokens, num_kv_heads=heads, head_size=size, dtype=dtype)
    layout = Layout.of_spec(quantize(spec, "rocm_pages"), "LHBNC", num_blocks=blocks)
    key, value = layout.part_view("key", 0), layout.part_view("value", 0)
    return key.reordered((0, 1, 3, 2, 4)), value.reordered((0, 1, 3, 2))


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(1, 3), DTYPES)
def test_every_element_is_where_the_shapes_put_it(
    blocks: int, heads: int, tokens: int, vectors: int, dtype: str
) -> None:
    item = numpy_dtype(dtype).itemsize
    x = 16 // item
    size = vectors * x
    pool = np.random.default_rng(0).integers(0, 256, 2 * blocks * heads * tokens * size * item, np.uint8)
    key, value = rocm_views(blocks, heads, tokens, size, dtype)
    keys, values = pool.reshape(2, -1)
    assert view(pool, key).tobytes() == keys.reshape(blocks, heads, vectors, tokens, x, item).tobytes()
    assert view(pool, value).tobytes() == values.reshape(blocks, heads, size, tokens, item).tobytes()
    assert value.end == pool.size


@pytest.mark.vllm
def test_an_installed_vllm_makes_the_same_views() -> None:
    import torch
    from vllm.v1.attention.ops.paged_attn import PagedAttention

    from hkv.layout.views import torch as torch_views

    for dtype, blocks, heads, tokens, size in (("bfloat16", 3, 2, 16, 64), ("float32", 1, 3, 5, 8)):
        views = rocm_views(blocks, heads, tokens, size, dtype)
        raw = torch.arange(views[1].end, dtype=torch.int32).to(torch.uint8)
        cache = raw.view(getattr(torch, dtype)).view(2, blocks, tokens * heads * size)
        for mine, theirs in zip(views, PagedAttention.split_kv_cache(cache, heads, size), strict=True):
            seen = torch_views.view(raw, mine)
            assert (seen.shape, seen.stride(), seen.data_ptr()) == (theirs.shape, theirs.stride(), theirs.data_ptr())


def test_recorded_answers(data_dir):
    """400 layouts recorded from vLLM 0.33; the only ones it grants and HKV refuses have axes that do not nest."""
    records = json.loads((data_dir / "layouts" / "vllm-0.33.json").read_text())
    assert [record["case"] for record in records] == random_cases(len(records)), "the file is of another generator"
    outcomes = [outcome(record["case"], record["answer"]) for record in records]
    assert collections.Counter(outcomes) == {
        "equal": 308,
        "both refuse": 90,
        "axes that do not nest": 2,
    }
    orders = {record["case"]["order"] for record, what in zip(records, outcomes, strict=True) if what == "equal"}
    assert len(orders) == 6


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_installed_answers():
    installed = InstalledLayouts()
    outcomes = collections.Counter(outcome(case, installed.answer(case)) for case in random_cases(2000, seed=7))
    assert set(outcomes) == set(OUTCOMES) - {"DIFFERENT"}
    assert outcomes["equal"] > 1400


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_nvfp4_planes_lie_where_vllm_splits_them():
    """In HND its data and scales lie as HKV says; in NHD, which HKV refuses, they share bytes."""
    InstalledLayouts()  # vLLM's modules, in the order in which they can be imported
    split = importlib.import_module("vllm.utils.torch_utils").nvfp4_split_data_scale
    torch = importlib.import_module("torch")
    spec = quantize(FullAttention(block_size=4, num_kv_heads=3, head_size=32, dtype="bfloat16"), "nvfp4")
    layout = Layout.of_spec(spec, "LBHNC", num_blocks=2)
    hnd = torch.zeros((2, 6, 4, 18), dtype=torch.uint8)
    for side, name in enumerate(("key", "value")):
        for tensor, part in zip(split(hnd[:, 3 * side : 3 * side + 3]), (name, f"{name}_scale"), strict=True):
            view = layout.part_view(part, 0)
            assert (tuple(tensor.shape), tensor.stride(), tensor.storage_offset()) == (
                view.shape,
                view.strides,
                view.offset,
            )
    nhd = torch.zeros((2, 4, 6, 18), dtype=torch.uint8).transpose(1, 2)
    data, scale = (touched(tensor) for tensor in split(nhd[:, :3]))
    assert data & scale


def touched(tensor: Any) -> set[int]:
    indices = itertools.product(*map(range, tensor.shape))
    return {tensor.storage_offset() + sum(i * s for i, s in zip(at, tensor.stride(), strict=True)) for at in indices}

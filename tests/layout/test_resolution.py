"""Legal orders, the one that is chosen, and the kernel block size that suits every kernel."""

from __future__ import annotations

import itertools

import pytest

from hkv.errors import LayoutError
from hkv.layout.block_layout import Layout, Order
from hkv.layout.resolution import (
    DEFAULT_PREFERENCE,
    check_groups,
    legal_orders,
    resolve,
)
from hkv.spec import FullAttention, Mamba, SlidingWindow

COMPACT = (Order.LBNHC, Order.LBHNC, Order.BLNHC, Order.BLHNC)
SMALL = FullAttention(block_size=16, num_kv_heads=2, head_size=64)
LARGE = FullAttention(block_size=16, num_kv_heads=8, head_size=64)


def test_what_each_order_is():
    facts = {o.value: (o.layer_compact, o.block_outermost, o.block_compact, o.block_contiguous, o.alias) for o in Order}
    assert facts == {
        "LBHNC": (True, False, True, True, "HND"),
        "LBNHC": (True, False, True, False, "NHD"),
        "LHBNC": (True, False, False, False, None),
        "BLHNC": (False, True, True, True, None),
        "BLNHC": (False, True, True, False, None),
        "BHLNC": (False, True, False, False, None),
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

"""The query whether tokens flatten without a copy, against NumPy, which copies only where it must."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given

from hkv.layout.block_layout import Layout, Order
from hkv.layout.views import numpy as numpy_views
from hkv.spec import FullAttention, MLAAttention
from tests.layout.geometries import Case, cases


def flattens(layout: Layout) -> bool:
    """True if NumPy makes one axis of blocks, kernel blocks and states without a copy."""
    bytes_of = layout.cells()
    pool = np.zeros(bytes_of.end, np.uint8)
    layer = numpy_views.view(pool, bytes_of)[0]
    tokens = layer.transpose(0, 1, 3, 2, 4)
    flat = tokens.reshape(layout.num_blocks * layout.split * layout.shape[3], *tokens.shape[3:])
    return np.shares_memory(flat, pool)


SPEC = FullAttention(block_size=8, num_kv_heads=2, head_size=4)


@pytest.mark.parametrize("order", Order, ids=lambda order: order.value)
@pytest.mark.parametrize("kernel", [None, 4])
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize(
    "spec", [SPEC, dataclasses.replace(SPEC, num_kv_heads=1), MLAAttention(block_size=8, head_size=6)]
)
def test_orders(order: Order, kernel: int | None, blocks: int, spec: FullAttention) -> None:
    for layers in (1, 2):
        try:
            layout = Layout.of_spec(spec, order, num_blocks=blocks, num_layers=layers, kernel_block_size=kernel)
        except ValueError:
            continue
        assert layout.tokens_flatten == flattens(layout)


def test_padding_keeps_blocks_apart() -> None:
    padded = dataclasses.replace(SPEC, page_size_padded=512)
    layout = Layout.of_spec(padded, "LBNHC", num_blocks=3)
    assert not layout.tokens_flatten
    assert not flattens(layout)
    assert Layout.of_spec(SPEC, "LBNHC", num_blocks=3).tokens_flatten


@given(cases())
def test_drawn_layouts(case: Case) -> None:
    layout = case.layout()
    assert layout.tokens_flatten == flattens(layout)

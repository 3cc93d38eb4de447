"""Vectors of layouts: strides, and the addresses of single elements."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from hkv.errors import LayoutError
from hkv.layout.block_layout import Layout
from hkv.layout.orders import Order
from hkv.spec import FullAttention, LayerSpec, Mamba, MLAAttention, SlidingWindow
from hkv.spec.written import spec_record
from reference.layout import cell_addresses, element_addresses

SPECS: dict[str, LayerSpec] = {
    "full, all sizes different": FullAttention(
        block_size=4, num_kv_heads=3, head_size=6, head_size_v=5, dtype="float16"
    ),
    "full, all sizes equal": FullAttention(block_size=2, num_kv_heads=2, head_size=2, dtype="bfloat16"),
    "full, padded": FullAttention(block_size=4, num_kv_heads=2, head_size=4, dtype="int8", page_size_padded=96),
    "window": SlidingWindow(block_size=4, num_kv_heads=1, head_size=8, dtype="float32", window=6),
    "latent": MLAAttention(block_size=4, head_size=9, dtype="bfloat16"),
    "states": Mamba(block_size=4, shapes=((2, 3), (2, 2, 2)), dtypes=("bfloat16", "float32")),
}
"""Layers small enough that every byte can be listed."""

LAYERS, BLOCKS = 2, 3

ADDRESSES = 24
"""Elements of one layout whose address is given."""


def stride_cases() -> Iterator[dict[str, Any]]:
    """Every small layer in every order that can express it, whole and in kernel blocks."""
    for name, spec, order, kernel, layout in _layouts():
        yield {
            "name": f"{name}, {order.value}" + (f", kernel blocks of {kernel}" if kernel else ""),
            "input": _input(spec, order, kernel),
            "expected": {
                "axes": ["layer", "kernel block", "head", "state", "byte"],
                "shape": list(layout.shape),
                "strides": list(layout.strides),
                "kernel_blocks_per_block": layout.split,
                "page_bytes": layout.page_size,
                "end": layout.end,
            },
        }


def address_cases() -> Iterator[dict[str, Any]]:
    """Elements of the same layouts, found by walking through memory."""
    for name, spec, order, kernel, _ in _layouts():
        cells = cell_addresses(spec, order.value, LAYERS, BLOCKS, kernel_block_size=kernel)
        states = spec.num_states if kernel is None else spec.states_in(kernel)
        found = element_addresses(spec, cells, states)
        elements = sorted(key for key in found if key[-1] == 0)
        chosen = random.Random(name + order.value).sample(elements, min(ADDRESSES, len(elements)))
        fields = ("part", "layer", "block", "head", "state", "element")
        yield {
            "name": f"{name}, {order.value}" + (f", kernel blocks of {kernel}" if kernel else ""),
            "input": {
                **_input(spec, order, kernel),
                "elements": [dict(zip(fields, key, strict=False)) for key in chosen],
            },
            "expected": {"addresses": [found[key] for key in chosen]},
        }


def _layouts() -> Iterator[tuple[str, LayerSpec, Order, int | None, Layout]]:
    for name, spec in SPECS.items():
        for order in Order:
            for kernel in (None, 2) if not spec.snapshot else (None,):
                if kernel is not None and spec.block_size <= kernel:
                    continue
                try:
                    layout = Layout.of_spec(spec, order, num_blocks=BLOCKS, num_layers=LAYERS, kernel_block_size=kernel)
                except LayoutError:
                    continue  # this order cannot express the padding or the split
                yield name, spec, order, kernel, layout


def _input(spec: LayerSpec, order: Order, kernel: int | None) -> dict[str, Any]:
    return {
        "spec": spec_record(spec),
        "order": order.value,
        "num_layers": LAYERS,
        "num_blocks": BLOCKS,
        "kernel_block_size": kernel,
    }

"""The examples of docs/layouts.md."""

from __future__ import annotations

import pathlib
import re

import pytest

from hkv.layout.block_layout import Layout, Order, Place
from hkv.layout.content import QUANTIZATIONS
from hkv.spec import FullAttention

TEXT = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "layouts.md").read_text()


@pytest.fixture
def names() -> dict:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
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

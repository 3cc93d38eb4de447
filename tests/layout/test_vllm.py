"""Strides and views against vLLM 0.33: recorded answers, and its own functions where it is installed."""

from __future__ import annotations

import collections
import importlib
import itertools
import json
from typing import Any

import pytest

from benchmarks.compare_layouts import OUTCOMES, outcome
from benchmarks.installed_layouts import InstalledLayouts, random_cases
from hkv.layout.block_layout import Layout
from hkv.layout.content import quantize
from hkv.spec import FullAttention


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

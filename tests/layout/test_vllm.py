"""Strides and views against vLLM 0.33: recorded answers, and its own functions where it is installed."""

from __future__ import annotations

import importlib
import itertools
import json
import math
from typing import Any

import pytest

from hkv.content import quantize
from hkv.errors import HKVError
from hkv.layout import Layout
from hkv.oracle.vllm_layouts import InstalledLayouts, random_cases, spec_of
from hkv.spec import FullAttention


def our_answer(case: dict[str, Any]) -> dict[str, Any]:
    places = {name: case[name] for name in ("num_blocks", "num_layers", "layer_stride", "block_stride", "offset")}
    try:
        spec = spec_of(case)
        strides = Layout.of_spec(spec, case["order"], **places).strides
        layout = Layout.of_spec(spec, case["order"], **places, kernel_block_size=case["kernel_block_size"])
        views = [layout.layer_view(layer) for layer in range(layout.num_layers)]
    except HKVError as error:
        return {"refused": str(error)}
    shown = [{"shape": list(v.shape), "strides": list(v.strides), "offset": v.offset} for v in views]
    return {"strides": list(strides), "views": shown}


def nests(shape: list[int], strides: list[int]) -> bool:
    reach = 1
    for stride, extent in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride < reach:
            return False
        reach += (extent - 1) * stride
    return True


def manager_shape(case: dict[str, Any]) -> list[int]:
    spec = spec_of(case)
    return [case["num_layers"], case["num_blocks"], spec.num_heads, spec.num_states, spec.content_bytes]


def loses_states(case: dict[str, Any], view: dict[str, list[int]]) -> bool:
    spec = spec_of(case)
    return math.prod(view["shape"][:3]) < case["num_blocks"] * spec.num_heads * spec.num_states


def compare(case: dict[str, Any], theirs: dict[str, Any]) -> str:
    ours = our_answer(case)
    if "refused" in theirs:
        assert "refused" in ours, (case, theirs)
        return "both refuse"
    if "refused" in ours:
        if loses_states(case, theirs["views"][0]):
            return "a kernel block too small for its states"
        view = theirs["views"][0]
        both = nests(manager_shape(case), theirs["strides"]) and nests(view["shape"], view["strides"])
        assert not both, (case, ours)
        return "axes that do not nest"
    assert ours == theirs, case
    return "equal"


def test_recorded_answers(data_dir):
    """400 layouts recorded from vLLM 0.33; the only ones it grants and HKV refuses have axes that do not nest."""
    records = json.loads((data_dir / "layouts" / "vllm-0.33.json").read_text())
    assert [record["case"] for record in records] == random_cases(len(records)), "the file is of another generator"
    outcomes = [compare(record["case"], record["answer"]) for record in records]
    assert {name: outcomes.count(name) for name in set(outcomes)} == {
        "equal": 308,
        "both refuse": 90,
        "axes that do not nest": 2,
    }
    orders = {record["case"]["order"] for record, outcome in zip(records, outcomes, strict=True) if outcome == "equal"}
    assert len(orders) == 6


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_installed_answers():
    installed = InstalledLayouts()
    outcomes = {}
    for case in random_cases(2000, seed=7):
        outcome = compare(case, installed.answer(case))
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    granted = {"equal", "both refuse", "axes that do not nest", "a kernel block too small for its states"}
    assert set(outcomes) == granted
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

"""A live worker's tensors, tables and slots: right ones pass, and each planted mistake is found and named."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from hkv.dialects.vllm.attach.tensors import LiveTensor, overlap

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_tensors_that_share_a_byte_are_named() -> None:
    """Two layers whose blocks alternate, of one head and of several, side by side and shifted into each other."""

    def layer(offset: int, storage: int = 0, strides: tuple[int, ...] = (64, 16, 8, 2)) -> LiveTensor:
        return LiveTensor((5, 2, 2, 4), strides, offset, "bfloat16", storage)

    assert overlap({"a": layer(0), "b": layer(32), "c": layer(0, storage=1)}) is None
    assert overlap({"a": layer(0), "b": layer(24)}) == "a and b both have byte 24"
    assert overlap({"a": layer(0), "b": layer(64 * 5 + 32)}) is None
    apart = (16, 96, 8, 2)  # heads outside of blocks
    assert overlap({"a": layer(0, strides=apart), "b": layer(192, strides=apart)}) is None
    assert overlap({"a": layer(0, strides=apart), "b": layer(96, strides=apart)}) == "a and b both have byte 96"
    assert "to nest" in str(overlap({"a": layer(0, strides=(8, 16, 8, 2))}))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], pathlib.Path]:
    folder = tmp_path_factory.mktemp("worker")
    environment = {"TRITON_INTERPRET": "1", "VLLM_LOGGING_LEVEL": "ERROR", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "tests.attach.live_worker", str(folder)],
        env={**os.environ, **environment, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1]), folder


@pytest.mark.vllm
def test_a_right_worker_differs_in_nothing(found: tuple[dict[str, Any], pathlib.Path]) -> None:
    """Views of vLLM's own `allocate_kv_cache`, and steps of its scheduler, batch and tables, mixtures of groups."""
    views, steps = found[0]["views"], found[0]["steps"]
    assert (views["difference"], steps["difference"]) == (None, None)
    assert views["judged"]["tensor that differs from the plan"] == 28
    assert all(count > 500 for count in steps["judged"].values())
    assert len(steps["judged"]) == 3


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("planted", "call", "told"),
    [
        ("tensors that overlap", "tensors that overlap", "full.0 and full.1 both have byte 1,024"),
        ("other strides", "tensor that differs from the plan", "'strides': (256, 32, 64, 2)"),
        ("slots of another's block", "slots outside a request's own blocks", "positions = [[0, "),
        ("slots of another token", "slots of a request's tokens", "positions = [[0, "),
        ("a table a column off", "block table other than the manager's row", "4, 0, 29], expected [1, 2, 3, 4, 29]"),
        ("a table not copied", "block table on the device other than the manager's row", "[0, 0, 0, 0], expected [1"),
    ],
)
def test_a_planted_mistake_is_found_and_named(
    planted: str, call: str, told: str, found: tuple[dict[str, Any], pathlib.Path]
) -> None:
    difference = found[0][planted]["difference"]
    assert difference.startswith(f"vllm-tensors: {call} of ")
    assert told in difference


@pytest.mark.vllm
def test_hooks_are_set_as_a_worker_sets_up_its_device(found: tuple[dict[str, Any], pathlib.Path]) -> None:
    assert found[0]["a device set up"] == "tensors that overlap"


@pytest.mark.vllm
def test_start_and_steps_are_written_down(found: tuple[dict[str, Any], pathlib.Path]) -> None:
    (path,) = (found[1] / "steps").glob("*-vllm-tensors.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {*lines[0]} == {"step", "new_blocks", "slots"}
    (path,) = (found[1] / "views").glob("*-vllm-tensors.jsonl")
    first = json.loads(path.read_text().splitlines()[0])
    assert (first["layout"], first["num_blocks"], first["kernel_block_sizes"]) == ("LBNHC", 9, [4, 4])
    assert first["tensors"]["full.1"] == {
        "shape": [36, 2, 4, 16],
        "strides": [256, 32, 64, 2],
        "offset": 9216,
        "dtype": "bfloat16",
    }

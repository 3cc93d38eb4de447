"""Recorded logs: the compiled cache answers every line as vLLM 0.33 did."""

from __future__ import annotations

import pathlib

import pytest

from hkv.dialects.vllm.engines.jax import JaxEngine
from hkv.dialects.vllm.traffic.headers import FEATURES
from hkv.oracle.check import check_log
from hkv.oracle.log_file import read_log

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
LOGS = [
    path for feature in FEATURES for path in sorted((ROOT / "tests" / "data" / "oplogs").glob(f"*{feature}*.jsonl"))
]


def test_there_are_logs() -> None:
    assert len(LOGS) >= 12


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_own_logs(path: pathlib.Path) -> None:
    difference = check_log(read_log(path), JaxEngine)
    assert difference is None, difference.describe()


@pytest.mark.parametrize("feature", FEATURES)
def test_shared_logs(shared_dir: pathlib.Path, feature: str) -> None:
    paths = sorted((shared_dir / "oplogs").glob(f"{feature}-*.jsonl"))
    assert len(paths) == 24
    for path in paths:
        difference = check_log(read_log(path), JaxEngine)
        assert difference is None, difference.describe()

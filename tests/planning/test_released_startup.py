"""Start-up numbers of released models: HKV's against those that vLLM 0.33 itself printed."""

from __future__ import annotations

import pathlib

import pytest

from benchmarks.startup_records import difference, records_by_model
from hkv.model.huggingface import load_config

PATH = pathlib.Path(__file__).resolve().parent.parent / "data" / "planning" / "released_startup.jsonl.gz"

RECORDS = records_by_model(PATH)
"""Starts of vLLM 0.33.0 that `benchmarks/compare_startup.py --released --record` wrote."""


@pytest.mark.parametrize("model", RECORDS)
def test_a_released_model_starts_as_vllm_starts_it(model: str) -> None:
    config = load_config(model)
    for record in RECORDS[model]:
        found = difference(config, record)
        assert found is None, f"{found}: {record}"


def test_the_records_are_worth_it() -> None:
    """Most released models are there, one-byte caches and refusals among the answers, and GPUs of each generation."""
    starts = [record for each in RECORDS.values() for record in each]
    assert len(RECORDS) > 120
    assert {"fp8", "fp8_e5m2", "int8_per_token_head"} <= {start["options"].get("kv_cache_dtype") for start in starts}
    assert {"h100", "a100", "l40s"} <= {start["device"] for start in starts}
    assert 0 < sum("refused" in start["vllm"] for start in starts) < len(starts) // 2

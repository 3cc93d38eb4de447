"""`benchmarks/dialects.py`: both dialects run the same requests, and forms that find different tokens are noticed."""

import random

import click
import pytest

from benchmarks.dialects import Sides, forms_of, measure
from hkv.dialects.rtp_llm.config import HYBRID
from hkv.replay.schedule import Arrival, Schedule
from hkv.spec import spec_from_text


def made() -> list[Arrival]:
    """Requests over three prefixes; two of them fit at once."""
    rng, arrivals = random.Random(1), []
    for index in range(12):
        keys = [*range(100 * (index % 3), 100 * (index % 3) + 4), *range(1000 + 50 * index, 1050 + 50 * index)]
        arrivals.append(Arrival(index, index, rng.randint(16, 28), rng.randint(1, 9), lambda keys=keys: keys))
    return arrivals


def test_all_forms_run_the_same_requests() -> None:
    specs = [spec_from_text("full:4"), spec_from_text("mamba:4")]
    sides = Sides(specs, 30, HYBRID, Schedule(max_model_len=64), made())
    forms = forms_of(sides, only_compiled=False)
    assert list(forms) == ["vllm-0.33, NumPy", "rtp-llm/hybrid, NumPy", "vllm-0.33, JAX", "rtp-llm/hybrid, JAX"]
    assert list(forms_of(sides, only_compiled=True)) == list(forms)[2:]
    assert sides.rtp_numpy()[1] > 0
    assert sides.vllm_numpy()[1] > 0


def test_forms_that_find_different_tokens_are_noticed() -> None:
    measured = measure({"a, NumPy": lambda: (2.0, 7), "a, JAX": lambda: (1.0, 7)}, 10, 2)
    assert measured["a, NumPy"]["ns_per_block_operation"] == 2e8
    assert measured["a, JAX"]["hit_tokens"] == 7
    with pytest.raises(click.ClickException, match="a, NumPy finds 7 tokens, a, JAX 8"):
        measure({"a, NumPy": lambda: (2.0, 7), "a, JAX": lambda: (1.0, 8)}, 10, 2)

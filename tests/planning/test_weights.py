"""Weights on each rank: HKV's formulas against the parameters of vLLM 0.33's own classes on the meta device."""

from __future__ import annotations

import collections
from typing import Any

import pytest

from benchmarks import weights
from hkv.dialects.vllm.weights import weights_of
from hkv.errors import ConfigError, PlanError
from hkv.model.huggingface import load_config
from hkv.model.huggingface.family import words

RECORDS = weights.records()
"""Answers of vLLM 0.33.0 that `benchmarks/weights.py --record` wrote."""

UNKNOWN = words(
    """
    cohere-transcribe command-a command-r command-r-plus command-r7b gemma-3-12b gemma-4-e4b glm-4.5-air glm-4.7
    glm-4.7-flash glm-5.3 granite-4.0-h-small granite-4.1-8b kimi-k2.5 kimi-k2.6 kimi-k2.7-code kimi-k3
    kimi-linear-48b-a3b llama-3.2-90b-vision llama-3.3-70b llama-4-maverick llama-4-scout minimax-m2 minimax-m2.1
    mistral-small-24b-2501 mistral-small-4-119b nemotron-parse-v1.1 qwen2.5-72b seed-oss-36b whisper-large-v3
    whisper-large-v3-turbo
    """
)
"""Models whose weights are refused: an unknown family or packing, or a shipped config that lacks fields."""


def test_weights_are_those_of_vllms_classes() -> None:
    different = [(record, weights.ours(record)) for record in RECORDS if weights.verdict(record) == "different"]
    assert not different


def test_what_is_not_known_is_refused_by_name() -> None:
    unknown = {record["model"] for record in RECORDS if weights.verdict(record) == "unknown"}
    assert unknown == UNKNOWN, unknown ^ UNKNOWN
    for record in RECORDS:
        if record["model"] in UNKNOWN:
            answer = weights.ours(record)
            assert isinstance(answer, ConfigError)
            assert "--weights" in str(answer)


def test_the_records_are_worth_it() -> None:
    """Every released model is there, stages, packings, dealt experts and other GPUs too, and few refusals."""
    found = collections.Counter(weights.verdict(record) for record in RECORDS)
    assert len({record["model"] for record in RECORDS}) > 130
    assert found["equal"] > 3 * found["unknown"]
    for name in ("tp", "pp", "ep", "packing", "device"):
        assert len({record[name] for record in RECORDS}) > 1, name


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"quantization_config": {"quant_method": "torchao"}}, "torchao"),
        ({"model_type": "gpt_neox"}, "gpt_neox"),
        ({"vocab_size": None}, "vocab_size"),
        ({"intermediate_size": "x"}, "intermediate_size"),
    ],
)
def test_refusals(change: dict[str, Any], match: str) -> None:
    config = {**load_config("llama-3.1-8b"), **change}
    with pytest.raises(ConfigError, match=match):
        weights_of({name: value for name, value in config.items() if value is not None})


def test_ranks_that_cannot_share_are_refused() -> None:
    with pytest.raises(PlanError, match="tensor_parallel_size"):
        weights_of(load_config("llama-3.1-8b"), tensor_parallel=3)

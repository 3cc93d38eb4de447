"""Weights on each rank: HKV's formulas against the parameters of vLLM 0.33's own classes on the meta device."""

from __future__ import annotations

import collections
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import weights
from hkv.dialects.vllm.planning.engine_settings import LARGE_TABLES, MIB
from hkv.dialects.vllm.weights import rotary_tables, weights_of
from hkv.errors import ConfigError, HKVError, PlanError
from hkv.model.huggingface import load_config
from hkv.model.huggingface.family import type_of, words
from hkv.model.released import released_models

DATA = pathlib.Path(__file__).parents[1] / "data"

RECORDS = weights.records()
"""Answers of vLLM 0.33.0 that `benchmarks/weights.py --record` wrote."""

UNKNOWN = words(
    """
    cohere-transcribe glm-5.3 kimi-k2.5 kimi-k2.6 kimi-k2.7-code kimi-k3 kimi-linear-48b-a3b llama-3.2-90b-vision
    nemotron-parse-v1.1 whisper-large-v3 whisper-large-v3-turbo
    """
)
"""Models whose weights are refused: an unknown family or packing, or a shipped config that lacks fields."""

TWO_TABLES = words("deepseek-v4-flash")
"""Models with large tables of rotary positions that HKV does not count."""


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


def test_configs_with_one_field_spoilt_are_counted_or_refused_by_name() -> None:
    """Of each family: every field left out, of another type, or nought; and the configs of the tests as they are."""
    configs = [json.loads(path.read_text()) for path in sorted((DATA / "models").glob("*.json"))]
    families = {str(type_of(config)): config for config in (*configs, *(each.config() for each in released_models()))}
    refused = 0
    for config in (*configs, *(spoilt for each in families.values() for spoilt in _spoilt(each))):
        try:
            weights_of(config)
        except HKVError as error:
            refused += bool(error.argument)
    assert refused > 400


def _spoilt(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A config with one field of its own, or of its decoder, spoilt in one way; which, goes round."""
    inner = config.get("text_config")
    names: list[str] = [*config, *(inner or {})]
    for number, name in enumerate(names):
        within = number >= len(config)
        fields: dict[str, Any] = dict(inner) if within and inner else dict(config)
        fields[name] = (None, 7, "x", 0, [1], -1)[number % 6]
        if number % 7 == 0:
            del fields[name]
        yield {**config, "text_config": fields} if within else fields


def test_rotary_tables_are_among_the_buffers_of_vllms_classes() -> None:
    """To a MiB, which other buffers fill, on every rank and stage; and the large ones are all known."""
    for record in RECORDS:
        buffers = record["vllm"].get("buffers", [0])
        found = rotary_tables(load_config(record["model"]))
        if found is None:
            assert max(buffers) <= LARGE_TABLES or record["model"] in UNKNOWN | TWO_TABLES, record
        elif buffers != [0]:
            assert all(0 <= each - found < MIB for each in buffers), (record, found)


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
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "modelopt NVFP4"),
        (
            {"quantization_config": {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}},
            "modelopt NVFP4",
        ),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}},
            "compressed-tensors nvfp4-pack-quantized",
        ),
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

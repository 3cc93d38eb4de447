"""`hkv plan --requests N`: the fewest GPUs that hold so many requests at once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from hkv.cli import cli
from hkv.errors import ConfigError, PlanError

LENGTH = ("--gpu", "h100", "--max-model-len", "32k")


def asked(*words: str) -> dict[str, Any]:
    found = CliRunner().invoke(cli, ["plan", *words, *LENGTH, "--json", "-"], catch_exceptions=False)
    return json.loads(found.output)


def test_the_fewest_gpus_hold_the_requests_and_fewer_do_not() -> None:
    answer = asked("llama-3.1-8b", "--requests", "40")
    best = answer["fewest"]
    assert best["engines"] * best["requests"] >= 40
    assert best["gpus"] == best["tp"] * best["pp"] * best["engines"] == min(d["gpus"] for d in answer["deployments"])
    for each in answer["deployments"]:
        assert (each["engines"] - 1) * each["requests"] < 40
    assert f"--tensor-parallel-size {best['tp']}" in answer["serve"]


def test_given_ranks_are_the_only_ones_tried() -> None:
    answer = asked("llama-3.1-8b", "--requests", "40", "--tp", "1,2")
    assert {each["tp"] for each in answer["deployments"]} == {1, 2}


def test_stages_are_tried_where_ranks_do_not_hold_the_weights() -> None:
    assert asked("deepseek-v3", "--requests", "1")["fewest"]["pp"] > 1


def test_refusals() -> None:
    with pytest.raises(PlanError, match=r"131\.42 GiB of weights"):
        asked("llama-3.1-70b", "--requests", "1", "--tp", "1", "--pp", "1")
    with pytest.raises(ConfigError, match="one model"):
        asked("llama-3.1-8b", "qwen3-8b", "--requests", "1")

"""`hkv plan` with a workload: hit rates on the planned GPUs."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from click.testing import CliRunner

from hkv.cli import cli, workload
from hkv.errors import ConfigError

MODEL = ("qwen3-0.6b", "--memory", "1GiB", "--max-model-len", "2048")
WORDS = ("--prompt", "300", "--answer", "20", "--shared", "60%", "--requests-per-second", "5")


def run(*words: str) -> str:
    return CliRunner().invoke(cli, ["plan", *MODEL, *words], catch_exceptions=False).output


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "REQUESTS", 40)


def test_hit_rates_are_those_of_replays(tmp_path: pathlib.Path) -> None:
    found: dict[str, Any] = json.loads(run(*WORDS, "--target-hit-rate", "1%", "--json", "-"))
    assert 0 < found["now"] <= found["twice_the_memory"] <= found["without_evictions"] <= 0.6 + 0.2
    assert found["target"]["reached"]["change"] == ""
    settings = workload.Drawn(300, 20, 60.0, 5.0)
    with workload.trace_of(settings) as path:
        words = "--model qwen3-0.6b --memory 1GiB --max-model-len 2048 --tokens-per-id 16 --device h100 --json -"
        replayed = json.loads(CliRunner().invoke(cli, ["replay", path, *words.split()]).output)
    assert replayed["totals"]["hit_rate"] == pytest.approx(found["now"])


def test_the_screen_has_80_columns_and_one_plot(tmp_path: pathlib.Path) -> None:
    plot = tmp_path / "plot.svg"
    said = run(*WORDS, "--target-hit-rate", "99%", "--plot", str(plot))
    assert max(map(len, said.splitlines())) <= 80
    assert "not reached" in said
    assert "assumed" in said
    assert plot.stat().st_size > 1000


def test_options_of_a_workload_want_one() -> None:
    with pytest.raises(ConfigError, match="--prompt or --trace"):
        run("--shared", "60%")
    with pytest.raises(ConfigError, match="percentage"):
        run("--prompt", "300", "--shared", "sixty")
    with pytest.raises(ConfigError, match="beside --trace"):
        run("--prompt", "300", "--trace", "x.jsonl")

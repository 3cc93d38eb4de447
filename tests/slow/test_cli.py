"""`hkv explore`: what it says, a planted defect with its shortest counterexample, limits, bad input.

`hkv plan` with a workload: hit rates on the planned GPUs.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hkv.cli import cli, workload
from hkv.cli.check import command as check
from hkv.cli.explore import command
from hkv.dialects.vllm.explore_command import DEFECTS
from hkv.errors import ConfigError, HKVError
from hkv.oracle.log_file import read_log
from hkv.oracle.side import CACHED, FREE, HELD
from hkv.testing.planting import applied
from tests.page.reading import data_of, drawn
from tests.testing.plain_explorer import CHUNK

SMALL = ["--num-blocks", "5", "--max-model-len", "2", "--prompt", "1", "--chunk", str(CHUNK)]
LEFT_OUT = ["--without", "evict", "--without", "reset", "--without", "delay"]
"""The space of `tests.testing.plain_explorer`, so that programs are shared."""


def run(*arguments: str) -> Result:
    """The command on the small space."""
    return CliRunner().invoke(command, [*SMALL, *LEFT_OUT, *arguments])


def test_a_kind_that_no_model_has_is_explored() -> None:
    done = CliRunner().invoke(command, ["--groups", "chunk_pair:1:2", "--num-blocks", "3", "--requests", "1"])
    assert done.exit_code == 0, done.output
    assert "exhausted: no invariant is broken" in done.output


def test_a_space_is_exhausted(tmp_path: pathlib.Path) -> None:
    done = run("--json", str(tmp_path / "report.json"), "--save", str(tmp_path / "none.jsonl"))
    assert done.exit_code == 0, done.output
    assert "exhausted: no invariant is broken" in done.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["exhausted"]
    assert report["states"] > 1000
    assert report["states_per_second"] > 0
    assert report["counterexample"] is None
    assert f"{report['states']:,} states, {report['transitions']:,} transitions, depth {report['depth']}" in done.output
    assert not (tmp_path / "none.jsonl").exists()


def test_limits_are_said() -> None:
    done = run("--limit-states", "100", "--json", "-")
    report = json.loads(done.stdout)
    assert done.exit_code == 0
    assert not report["exhausted"]
    assert "not exhausted" in run("--seconds", "0.000001").output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--prompt", "7"), "prompt"),
        (("--groups", "opaque:1"), "group"),
        (("--groups", "full:1,mamba:2"), "block_size"),
        (("--save", "no/such/folder/log.jsonl"), "save"),
    ],
)
def test_bad_input_is_refused_by_name(arguments: tuple[str, ...], named: str) -> None:
    done = run(*arguments)
    assert isinstance(done.exception, HKVError)
    assert named in done.exception.argument


def test_an_error_is_one_line_and_exit_status_two() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hkv", "explore", "--without", "nothing"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "--without" in done.stderr


@pytest.mark.parametrize("name", DEFECTS)
def test_defects_can_be_planted(name: str) -> None:
    """Their text still stands where they change it."""
    with applied(DEFECTS[name]):
        pass


def test_a_planted_defect_is_found_with_its_shortest_counterexample(tmp_path: pathlib.Path) -> None:
    """A window one token too short: arrive, compute one token, get a second, and the block of the first is given back
    when the second is asked for, though it reads the first. No four operations come to that. The page shows it."""
    path, html = tmp_path / "found.jsonl", tmp_path / "page.html"
    done = run("--plant", "window-one-short", "--save", str(path), "--html", str(html))
    assert done.exit_code == 1, done.output
    assert "broken: retirement, after 5 operations" in done.output
    log = read_log(path)
    names = [type(operation).__name__ for operation in log.operations]
    assert names == ["RequestOp", "AllocateOp", "AdvanceOp", "AppendOp", "AllocateOp", "StateOp"]
    assert CliRunner().invoke(check, [str(path), "--engine", "numpy"]).exit_code == 0
    (case,) = data_of(html.read_bytes())["cases"]
    assert case["headline"] == "broken: retirement"
    assert case["marks"][0]["title"] == "jax with window-one-short breaks: retirement"
    given_back, read = FREE | CACHED, HELD | CACHED
    assert [cells[1][0] for cells in drawn(case).values()] == [given_back, read]
    assert list(drawn(case)) == ["jax with window-one-short", "numpy"]


# `hkv plan` with a workload.

MODEL = ("qwen3-0.6b", "--memory", "1GiB", "--max-model-len", "2048")
WORDS = ("--prompt", "300", "--answer", "20", "--shared", "60%", "--requests-per-second", "5")


def planned(*words: str) -> str:
    return CliRunner().invoke(cli, ["plan", *MODEL, *words], catch_exceptions=False).output


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "REQUESTS", 40)


def test_hit_rates_are_those_of_replays(few: None) -> None:
    found: dict[str, Any] = json.loads(planned(*WORDS, "--target-hit-rate", "1%", "--json", "-"))
    assert 0 < found["now"] <= found["twice_the_memory"] <= found["without_evictions"] <= 0.6 + 0.2
    assert found["target"]["reached"]["change"] == ""
    settings = workload.Drawn(300, 20, 60.0, 5.0)
    with workload.trace_of(settings) as path:
        words = "--model qwen3-0.6b --memory 1GiB --max-model-len 2048 --tokens-per-id 16 --device h100 --json -"
        replayed = json.loads(CliRunner().invoke(cli, ["replay", path, *words.split()]).output)
    assert replayed["totals"]["hit_rate"] == pytest.approx(found["now"])


def test_the_screen_has_80_columns_and_one_plot(few: None, tmp_path: pathlib.Path) -> None:
    plot = tmp_path / "plot.svg"
    said = planned(*WORDS, "--target-hit-rate", "99%", "--plot", str(plot))
    assert max(map(len, said.splitlines())) <= 80
    assert "not reached" in said
    assert "assumed" in said
    assert plot.stat().st_size > 1000


def test_options_of_a_workload_want_one() -> None:
    with pytest.raises(ConfigError, match="--prompt or --trace"):
        planned("--shared", "60%")
    with pytest.raises(ConfigError, match="percentage"):
        planned("--prompt", "300", "--shared", "sixty")
    with pytest.raises(ConfigError, match="beside --trace"):
        planned("--prompt", "300", "--trace", "x.jsonl")

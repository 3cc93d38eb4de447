"""Texts of commands about themselves and about models, as a person reads them at 80 columns."""

from __future__ import annotations

import io
import json
import pathlib
import re
import tomllib
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from hkv.cli import COMMANDS, cli
from hkv.cli.replay import _Reasons
from hkv.limits import counted
from hkv.model.huggingface import Model, ReadOptions, load_config, read_model
from hkv.replay.command import model_name

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
GEMMA = ROOT / "tests" / "data" / "models" / "gemma3_text.json"


def test_the_command_alone_prints_its_usage_in_lines() -> None:
    done = CliRunner().invoke(cli, [])
    lines = done.stderr.splitlines()
    assert done.exit_code == 2
    assert lines[0].startswith("Usage: ")
    assert "Commands:" in lines
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    "command",
    [
        "diff --engines numpy,numpy --feature core --seeds 1 --steps 1",
        "watch numpy --feature core --seeds 1 --steps 1",
        "replay one.jsonl --groups full:16 --num-blocks 9 --engine numpy --warmup 1",
    ],
)
def test_one_of_a_thing_is_no_plural(command: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = {"input_length": 16, "output_length": 1, "hash_ids": [0], "tokens_per_id": 16}
    pathlib.Path("one.jsonl").write_text("".join(json.dumps({"timestamp": at, **line}) + "\n" for at in (0, 9)))
    said = " ".join(CliRunner().invoke(cli, command.split()).output.split())
    assert re.search(r"(?<![\d,.])1 (feature|seed|operation|request)\b", said), said
    assert not re.search(r"(?<![\d,.])1 (feature|seed|operation|rule|request|step|token|block)s", said), said
    assert (counted(0, "step"), counted(1, "step"), counted(2000, "step")) == ("0 steps", "1 step", "2,000 steps")


def test_a_replay_s_engine_is_said_to_depend_on_the_cache() -> None:
    said = " ".join(CliRunner().invoke(cli, ["replay", "--help"]).output.split())
    assert "[default: jax; numpy where that has no form of the cache]" in said


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str) -> None:
    assert "Example" in CliRunner().invoke(cli, [*command.split(), "--help"]).output


def groups(count: int) -> list[dict[str, Any]]:
    reasons = {"never seen": 380, "evicted": 70, "nothing to find": 50, "retired window": 0}
    return [
        {"group": f"swa:16:{2**n}", "layers": [n], "eagle": n == 1, "reasons": reasons} for n in range(10, 10 + count)
    ]


@pytest.mark.parametrize(("count", "first"), [(3, "beyond the hit"), (7, "group")])
def test_heads_are_whole_at_80_columns(count: int, first: str) -> None:
    """Three groups are columns; seven are rows."""
    many = groups(count)
    text = io.StringIO()
    Console(file=text, width=80).print(_Reasons(many, list(many[0]["reasons"])))
    shown = text.getvalue()
    assert "…" not in shown
    assert re.search(rf"┃ {first} ", shown)
    for word in (*(group["group"] for group in many), "seen", "evicted", "nothing", "find"):
        assert word in shown
    assert "retired" not in shown


@pytest.mark.parametrize(
    ("path", "called"),
    [
        ("models/gemma-3-1b/config.json", "gemma-3-1b (gemma3_text)"),
        ("models/gemma-3-1b", "gemma-3-1b (gemma3_text)"),
        ("models/gemma3_text.json", "gemma3_text"),
    ],
)
def test_a_model_goes_by_its_own_name(path: str, called: str) -> None:
    model = read_model(load_config(str(GEMMA)), ReadOptions())
    assert isinstance(model, Model)
    assert model_name(path, model) == called


def test_a_plan_says_sizes_as_people_read_them_and_bytes_in_json() -> None:
    arguments = ["plan", str(GEMMA), "--memory", "8GiB"]
    text = CliRunner().invoke(cli, arguments).output
    assert "a token     16 KiB; 104 KiB with full attention" in text
    assert "a sequence  352 MiB of windows" in text
    assert '"sequence_bytes": 369098752' in CliRunner().invoke(cli, [*arguments, "--json", "-"]).output


def test_readme_names_the_versions_of_jax_that_the_metadata_allows() -> None:
    first, last = re.findall(r"JAX (\S+) to (\d+\.\d+)\.\d+", (ROOT / "README.md").read_text())[0]
    major, minor = map(int, last.split("."))
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {f"jax>={first},<{major}.{minor + 1}", f"jaxlib>={first},<{major}.{minor + 1}"} <= set(wanted)

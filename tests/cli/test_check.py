"""`hkv check`: exit status, reports, JSON."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
from click.testing import CliRunner

from hkv.cli.check import command
from tests.oracle.sample import ALLOCATE, HEADER, OPERATIONS, encode, sample

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def good(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "good.jsonl"
    path.write_bytes(sample())
    return path


@pytest.fixture
def bad(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "bad.jsonl"
    lines = [*OPERATIONS[:3], {**ALLOCATE, "want": {"blocks": [[1, 3]]}}]
    path.write_bytes(encode([HEADER, *lines]))
    return path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command_line = [sys.executable, "-m", "hkv", "check", *arguments]
    return subprocess.run(command_line, cwd=ROOT, capture_output=True, text=True, check=False)


def test_agreement(good: pathlib.Path) -> None:
    result = CliRunner().invoke(command, [str(good)])
    assert (result.exit_code, result.output) == (0, "1 of 1 logs agree with engine numpy (15 operations)\n")


def test_difference(good: pathlib.Path, bad: pathlib.Path) -> None:
    result = CliRunner().invoke(command, [str(bad.parent)])
    assert result.exit_code == 1
    assert f"{bad}:5: allocate r1: blocks[0]" in result.output
    assert "wanted [1, 3]" in result.output
    assert "1 of 2 logs agree" in result.output


def test_coverage(good: pathlib.Path) -> None:
    result = CliRunner().invoke(command, [str(good), "--coverage"])
    assert result.exit_code == 0
    for rule in ("hit/none", "evict/named", "reset/done", "admit/gate", "copy/owner"):
        assert rule in result.output


def test_json_on_standard_output_is_alone(bad: pathlib.Path) -> None:
    result = CliRunner().invoke(command, [str(bad), "--coverage", "--json", "-"])
    found = json.loads(result.stdout)
    assert result.exit_code == 1
    assert (found["engine"], found["agrees"], found["operations"]) == ("numpy", False, 4)
    difference = found["logs"][0]["difference"]
    assert (difference["line"], difference["field"], difference["want"]) == (5, "blocks[0]", [1, 3])
    assert found["coverage"]["hit/none"] == {str(bad): 1}


def test_json_file(good: pathlib.Path, tmp_path: pathlib.Path) -> None:
    target = tmp_path / "out" / "result.json"
    result = CliRunner().invoke(command, [str(good), "--json", str(target)])
    assert result.exit_code == 0
    assert json.loads(target.read_text())["logs"] == [{"path": str(good), "agrees": True, "difference": None}]


def test_bugs(good: pathlib.Path) -> None:
    assert CliRunner().invoke(command, [str(good), "--bugs", "window-one-never-hits, negative-estimate"]).exit_code == 0


def test_exit_status_of_the_program(good: pathlib.Path, bad: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert run(str(good)).returncode == 0
    assert run(str(bad)).returncode == 1
    (tmp_path / "ugly.jsonl").write_bytes(sample() + b'{"op":"jump"}\n')
    ugly = str(tmp_path / "ugly.jsonl")
    for arguments, message in (
        ([ugly], f"hkv: {ugly}:17: op = 'jump': expected one of step"),
        ([str(tmp_path / "none")], "no such file"),
        ([str(good), "--engine", "torch"], "hkv: engine = 'torch': expected one of numpy"),
        ([str(good), "--bugs", "nonsense"], "hkv: bugs = 'nonsense'"),
        ([], "Missing argument"),
    ):
        done = run(*arguments)
        assert done.returncode == 2, done
        assert len(done.stderr.splitlines()) == 1
        assert message in done.stderr
        assert done.stdout == ""

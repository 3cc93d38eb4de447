"""`hkv check`: exit status, reports, JSON."""

from __future__ import annotations

import gzip
import json
import pathlib
import xml.etree.ElementTree as ElementTree

import pytest
from click.testing import CliRunner

from hkv.cli.check import command
from tests.cli.commands import perform
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


def test_difference(good: pathlib.Path, bad: pathlib.Path) -> None:
    result = CliRunner().invoke(command, [str(bad.parent)])
    assert result.exit_code == 1
    assert f"{bad}:5: allocate r1: blocks[0]" in result.output
    assert "log    [1, 3]" in result.output
    assert "1 of 2 logs agree" in result.output


def test_json_on_standard_output_is_alone(bad: pathlib.Path) -> None:
    result = CliRunner().invoke(command, [str(bad), "--coverage", "--json", "-"])
    found = json.loads(result.stdout)
    assert result.exit_code == 1
    assert (found["engine"], found["agrees"], found["operations"]) == ("numpy", False, 4)
    difference = found["logs"][0]["difference"]
    assert (difference["line"], difference["field"], difference["want"]) == (5, "blocks[0]", [1, 3])
    assert found["coverage"]["hit/none"] == {str(bad): 1}


def test_exit_status_of_the_program(
    good: pathlib.Path, bad: pathlib.Path, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert perform(["check", str(bad)], tmp_path).status == 1
    assert perform(["check", str(good)], tmp_path).status == 0
    (tmp_path / "ugly.jsonl").write_bytes(sample() + b'{"op":"jump"}\n')
    ugly = str(tmp_path / "ugly.jsonl")
    for arguments, message in (
        ([ugly], f"hkv: {ugly}:17: op = 'jump': expected one of step"),
        ([str(tmp_path / "none")], "no such file"),
        ([str(good), "--engine", "torch"], "hkv: engine = 'torch': expected one of numpy"),
        ([str(good), "--bugs", "nonsense"], "hkv: bugs = 'nonsense'"),
        ([], "Missing argument"),
    ):
        capfd.readouterr()
        done = perform(["check", *arguments], tmp_path)
        told = capfd.readouterr().err
        assert (done.status, done.out) == (2, b""), told
        assert len(told.splitlines()) == 1
        assert message in told


def test_one_that_cannot_be_read_does_not_hide_the_rest(good: pathlib.Path, bad: pathlib.Path) -> None:
    folder = good.parent
    (folder / "empty.jsonl").write_bytes(encode([HEADER]))
    (folder / "ugly.jsonl").write_bytes(b"no log\n")
    result = CliRunner().invoke(command, [str(folder), "--json", str(folder / "found.json")])
    assert result.exit_code == 1
    assert "1 of 3 logs agree" in result.output
    assert f"unusable: {folder / 'ugly.jsonl'}:1" in result.output
    assert f"empty: {folder / 'empty.jsonl'}" in result.output
    found = json.loads((folder / "found.json").read_text())
    assert {log["path"]: log["verdict"] for log in found["logs"]} == {
        str(good): "agrees",
        str(bad): "differs",
        str(folder / "empty.jsonl"): "empty",
    }
    assert list(found["unusable"]) == [str(folder / "ugly.jsonl")]


@pytest.mark.parametrize(
    ("fail_on", "status"), [("differs", 1), ("unusable", 1), ("empty", 0), ("ends early", 0), ("", 0), ("nonsense", 2)]
)
def test_fail_on(good: pathlib.Path, bad: pathlib.Path, fail_on: str, status: int) -> None:
    (good.parent / "ugly.jsonl").write_bytes(b"no log\n")
    assert perform(["check", str(good.parent), "--fail-on", fail_on], good.parent).status == status


def test_compressed_logs_and_parts(good: pathlib.Path, tmp_path: pathlib.Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    folder = tmp_path / "compressed"
    folder.mkdir()
    lines = sample().splitlines(keepends=True)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(sample()))
    (folder / "b.jsonl.zst").write_bytes(zstandard.compress(sample()))
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[:4])))
    (folder / "c.part1.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[4:])))
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(sample())[:-9])
    result = CliRunner().invoke(command, [str(folder)])
    assert "3 of 3 logs agree with engine numpy (45 operations)" in result.output
    assert "unusable:" in result.output
    assert "d.jsonl.gz" in result.output


def test_junit(good: pathlib.Path, bad: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (good.parent / "empty.jsonl").write_bytes(encode([HEADER]))
    report = tmp_path / "report.xml"
    CliRunner().invoke(command, [str(good.parent), "--junit", str(report), "--fail-on", "differs"])
    suite = ElementTree.parse(report).getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "1", "1")
    (failure,) = suite.iter("failure")
    assert "log    [1, 3]" in str(failure.text)


def test_a_log_that_ends_early_agrees_up_to_there(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "live.jsonl"
    path.write_bytes(encode([{**HEADER, "oplog": 3}, {"op": "step"}, {"op": "end", "reason": "poked"}]))
    result = CliRunner().invoke(command, [str(path)])
    assert result.exit_code == 0
    assert f"ends early: {path}: poked" in result.output
    assert CliRunner().invoke(command, [str(path), "--fail-on", "ends early"]).exit_code == 1

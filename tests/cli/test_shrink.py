"""`hkv record`, `hkv diff`, `hkv shrink`: what is recorded checks, and what becomes of differences."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import click
import pytest
from click.testing import CliRunner

from hkv.cli.check import command as check
from hkv.cli.diff import command as diff
from hkv.cli.record import command as record_command
from hkv.cli.shrink import command as shrink
from hkv.contract.case import Case
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.errors import ConfigError, HKVError
from hkv.oracle.log_file import read_log, write_log
from hkv.oracle.record import Only, differ, draw, record
from hkv.oracle.shrink import Shrinker
from tests.cli.commands import at_most

Patch = pytest.MonkeyPatch

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
WRONG = f"{ROOT / 'examples' / 'wrong_engine.py'}:WrongEngine"
RENAMED = f"{ROOT / 'tests' / 'oracle' / 'test_compare.py'}:Renamed"
ONE_FULL = ["--kinds", "full_attention", "--max-groups", "1", "--version", "1", "--feature", "core"]


@pytest.fixture
def log(tmp_path: pathlib.Path) -> pathlib.Path:
    recording = record(NumpyEngine, "core", 1, 1, 16, Only(frozenset({"full_attention"}), 1))
    path = tmp_path / "long.jsonl"
    write_log(path, recording.header, recording.operations, recording.answers)
    return path


def test_a_log_is_made_small(log: pathlib.Path) -> None:
    done = CliRunner().invoke(shrink, [str(log), "--engine", WRONG])
    assert done.exit_code == 0, done.output
    assert "broken invariant: index" in done.output
    small = log.with_name("long-small.jsonl")
    assert len(read_log(small).operations) <= 8
    assert CliRunner().invoke(check, [str(small)]).exit_code == 0
    assert CliRunner().invoke(check, [str(small), "--engine", WRONG]).exit_code == 1


def test_output_and_json(log: pathlib.Path, tmp_path: pathlib.Path) -> None:
    target = tmp_path / "out" / "s.jsonl"
    done = CliRunner().invoke(shrink, [str(log), "--engine", WRONG, "-o", str(target), "--json", "-"])
    found = json.loads(done.stdout)
    assert found["operations"] == len(read_log(target).operations) <= 8
    assert found["operations_before_shrinking"] == len(read_log(log).operations)
    assert found["invariant"] == "index"


def test_engines_that_agree(log: pathlib.Path) -> None:
    done = CliRunner().invoke(shrink, [str(log), "--engine", "numpy"])
    assert isinstance(done.exception, ConfigError)
    assert "numpy and numpy disagree" in str(done.exception)


def test_diff_names_invariant_and_operation(tmp_path: pathlib.Path) -> None:
    arguments = ["--engines", f"{WRONG},numpy", "--seeds", "4", *ONE_FULL, "--save", str(tmp_path), "--json", "-"]
    done = CliRunner().invoke(diff, arguments)
    found = json.loads(done.stdout)["differences"]["core"]
    assert (found["invariant"], found["operation"], found["operations"]) == ("index", "lookup id=r12", 7)
    assert found["operations_before_shrinking"] == 236
    assert len(read_log(found["log"]).operations) == 7


def at_the_sixtieth(error: BaseException) -> Callable[..., Case | None]:
    """`Shrinker.failing`, with an error at the sixtieth candidate."""
    whole, candidates = Shrinker.failing, list[object]()

    def failing(self: Shrinker, header: Any, operations: Any) -> Case | None:
        candidates.append(operations)
        if len(candidates) == 60:
            raise error
        return whole(self, header, operations)

    return failing


def test_a_difference_is_reported_though_shrinking_fails(tmp_path: pathlib.Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Shrinker, "failing", at_the_sixtieth(TypeError("object of type 'int' has no len()")))
    arguments = ["--engines", f"{WRONG},numpy", "--seeds", "4", *ONE_FULL, "--save", str(tmp_path)]
    done = CliRunner().invoke(diff, [*arguments, "--json", str(tmp_path / "found.json")])
    assert done.exit_code == 1, done.output
    (line,) = (line for line in done.output.splitlines() if "shrinking ended early" in line)
    assert "TypeError: object of type 'int' has no len() at " in line
    found = json.loads((tmp_path / "found.json").read_text())["differences"]["core"]
    assert len(read_log(found["log"]).operations) == found["operations"] < 236
    assert found["shrinking_problem"].startswith("TypeError")


def test_a_difference_is_reported_though_the_search_for_others_is_interrupted(monkeypatch: Patch) -> None:
    def differ_once(*arguments: Any) -> Any:
        if arguments[2] != "core":
            raise KeyboardInterrupt
        return differ(*arguments)

    monkeypatch.setattr("hkv.oracle.comparison.differ", differ_once)
    arguments = ["--engines", f"{WRONG},numpy", "--seeds", "4", *ONE_FULL, "--feature", "eagle"]
    done = CliRunner().invoke(diff, arguments, standalone_mode=False)
    assert isinstance(done.exception, click.Abort)
    assert "core seed 0 version 1: index: after allocate r11: " in done.output
    assert "  236 operations, on" in done.output


def test_a_difference_is_printed_though_its_log_cannot_be_saved(tmp_path: pathlib.Path) -> None:
    arguments = ["--engines", f"{WRONG},numpy", "--seeds", "4", *ONE_FULL, "--save", str(tmp_path / "folder")]
    with at_most(40):  # as on a full disk: what can be known before is refused before
        done = CliRunner().invoke(diff, arguments)
    assert isinstance(done.exception, HKVError)
    assert "core seed 0 version 1: index: after allocate r11: block" in done.output


def test_diff_without_shrinking(tmp_path: pathlib.Path) -> None:
    arguments = ["--engines", f"{WRONG},numpy", "--seeds", "4", *ONE_FULL, "--no-shrink"]
    done = CliRunner().invoke(diff, arguments)
    assert done.exit_code == 1
    assert "  236 operations, on" in done.output
    assert "216 more before these" in done.output
    assert "broken invariant: index" in done.output


def test_diff_up_to_a_renaming() -> None:
    arguments = ["--engines", f"{RENAMED},numpy", "--seeds", "2", "--feature", "partial", "--no-shrink"]
    assert CliRunner().invoke(diff, arguments).exit_code == 1
    done = CliRunner().invoke(diff, [*arguments, "--ids", "isomorphic"])
    assert done.exit_code == 0, done.output


def test_a_foreign_reference_is_named(log: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "__init__.py").write_text("")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import hkv.cli; hkv.cli.main()"
    for arguments in (["explain", str(log), "--line", "3"], ["diff", "--engines", "numpy,numpy"], ["shrink", str(log)]):
        command = [sys.executable, "-c", script, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith("hkv: package reference = ")
        assert len(done.stderr.splitlines()) == 1


# Recording and comparing, with the reference on both sides where vLLM is absent.


def test_what_is_recorded_checks(tmp_path: pathlib.Path) -> None:
    path, result = tmp_path / "a.jsonl", tmp_path / "r.json"
    arguments = ["--engine", "numpy", "--feature", "partial", "--seed", "7", "--steps", "6", "-o", str(path)]
    done = CliRunner().invoke(record_command, [*arguments, "--json", str(result)])
    assert done.exit_code == 0
    assert done.output.startswith(f"{path}: ")
    first = path.read_bytes()
    assert json.loads(first.splitlines()[0])["oplog"] == 2
    assert json.loads(result.read_text())["operations"] == len(first.splitlines()) - 1
    assert CliRunner().invoke(check, [str(path)]).exit_code == 0
    CliRunner().invoke(record_command, arguments)
    assert path.read_bytes() == first


def test_engines_must_be_two() -> None:
    for text in ("numpy", "numpy,torch", "numpy,numpy,numpy"):
        done = CliRunner().invoke(diff, ["--engines", text])
        assert isinstance(done.exception, ConfigError)
        assert done.exception.argument == "engines"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed, so nothing is missing")
def test_engine_that_is_missing_is_no_difference() -> None:
    done = CliRunner().invoke(diff, ["--engines", "numpy,vllm"])
    assert isinstance(done.exception, ConfigError)
    assert "vLLM 0.33 to be installed" in str(done.exception)
    assert done.output == ""


def test_defects_are_given_to_both_engines() -> None:
    command = ["--engines", "numpy,numpy", "--seeds", "3", "--feature", "core", "--bugs"]
    done = CliRunner().invoke(diff, [*command, "window-one-never-hits"])
    assert done.exit_code == 0, done.output
    header, _ = draw("core", 0, 1)
    recording, parted = differ(NumpyEngine, NumpyEngine, "core", 0, 1, 2, bugs=("window-one-never-hits",))
    assert parted is None
    assert (header.oplog, header.bugs) == (1, [])
    assert (recording.header.oplog, recording.header.bugs) == (2, ["window-one-never-hits"])
    with pytest.raises(ConfigError, match="window-one"):
        CliRunner().invoke(diff, [*command, "window-one"], catch_exceptions=False)

"""`hkv record` and `hkv diff`, with the reference on both sides where vLLM is absent."""

from __future__ import annotations

import importlib.util
import json
import pathlib

import pytest
from click.testing import CliRunner

from hkv.cli import diff, record
from hkv.cli.check import command as check
from hkv.contract.registry import dialect_of
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.log.structs import Hit
from hkv.errors import ConfigError
from hkv.oracle.record import differ, draw


class Optimist(NumpyEngine):
    """Says that one token more is hit."""

    def lookup(self, id: str) -> Hit:
        found = super().lookup(id)
        return Hit(found.hit + 1, found.blocks, found.shared_prefix) if found.hit else found


@pytest.fixture
def optimist(monkeypatch: pytest.MonkeyPatch) -> None:
    dialect = dialect_of("vllm-0.33")
    monkeypatch.setattr(type(dialect), "engines", {**dialect.engines, "jax": f"{__name__}:Optimist"})


def test_what_is_recorded_checks(tmp_path: pathlib.Path) -> None:
    path, result = tmp_path / "a.jsonl", tmp_path / "r.json"
    arguments = ["--engine", "numpy", "--feature", "partial", "--seed", "7", "--steps", "6", "-o", str(path)]
    done = CliRunner().invoke(record.command, [*arguments, "--json", str(result)])
    assert done.exit_code == 0
    assert done.output.startswith(f"{path}: ")
    first = path.read_bytes()
    assert json.loads(first.splitlines()[0])["oplog"] == 2
    assert json.loads(result.read_text())["operations"] == len(first.splitlines()) - 1
    assert CliRunner().invoke(check, [str(path)]).exit_code == 0
    CliRunner().invoke(record.command, arguments)
    assert path.read_bytes() == first


def test_version_1(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.jsonl"
    arguments = ["--engine", "numpy", "--feature", "core", "--seed", "2", "--version", "1", "-o", str(path)]
    assert CliRunner().invoke(record.command, arguments).exit_code == 0
    assert json.loads(path.read_text().splitlines()[0])["oplog"] == 1
    assert CliRunner().invoke(check, [str(path)]).exit_code == 0


def test_unknown_feature(tmp_path: pathlib.Path) -> None:
    done = CliRunner().invoke(record.command, ["--feature", "x", "--seed", "1", "-o", str(tmp_path / "a")])
    assert done.exit_code == 2
    assert "core" in done.output


def test_no_difference() -> None:
    done = CliRunner().invoke(diff.command, ["--engines", "numpy,numpy", "--seeds", "2", "--steps", "5", "--json", "-"])
    found = json.loads(done.stdout)
    assert done.exit_code == 0
    assert found["differences"] == {}
    assert found["operations"] > 100


def test_difference_is_saved_for_check(tmp_path: pathlib.Path, optimist: None) -> None:
    arguments = ["--engines", "jax,numpy", "--seeds", "8", "--feature", "core", "--save", str(tmp_path)]
    done = CliRunner().invoke(diff.command, arguments)
    assert done.exit_code == 1
    assert "jax and numpy: 1 difference in 1 features" in done.output
    (path,) = tmp_path.iterdir()
    lines = path.read_text().splitlines()
    last = json.loads(lines[-1])
    assert last["op"] == "lookup"
    assert f"line {len(lines)}: lookup id={last['id']}" in done.output
    assert f"wanted {last['want']['hit']}" in done.output
    assert CliRunner().invoke(check, [str(path)]).exit_code == 0
    assert CliRunner().invoke(check, [str(path), "--engine", "jax"]).exit_code == 1


def test_engines_must_be_two() -> None:
    for text in ("numpy", "numpy,torch", "numpy,numpy,numpy"):
        done = CliRunner().invoke(diff.command, ["--engines", text])
        assert isinstance(done.exception, ConfigError)
        assert done.exception.argument == "engines"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed, so nothing is missing")
def test_engine_that_is_missing_is_no_difference() -> None:
    done = CliRunner().invoke(diff.command, ["--engines", "numpy,vllm"])
    assert isinstance(done.exception, ConfigError)
    assert "vLLM 0.33 to be installed" in str(done.exception)
    assert done.output == ""


def test_defects_are_given_to_both_engines() -> None:
    command = ["--engines", "numpy,numpy", "--seeds", "3", "--feature", "core", "--bugs"]
    done = CliRunner().invoke(diff.command, [*command, "window-one-never-hits"])
    assert done.exit_code == 0, done.output
    header, _ = draw("core", 0, 1)
    recording, parted = differ(NumpyEngine, NumpyEngine, "core", 0, 1, 2, bugs=("window-one-never-hits",))
    assert parted is None
    assert (header.oplog, header.bugs) == (1, [])
    assert (recording.header.oplog, recording.header.bugs) == (2, ["window-one-never-hits"])
    with pytest.raises(ConfigError, match="window-one"):
        CliRunner().invoke(diff.command, [*command, "window-one"], catch_exceptions=False)

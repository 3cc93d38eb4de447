"""A log that differs only by a known upstream defect is said to agree under it, by name."""

from __future__ import annotations

import pathlib

import msgspec
import pytest
from click.testing import CliRunner

from hkv.cli.check import command
from hkv.dialects.vllm.engines.engine import attempt
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.oracle.check import with_bugs
from hkv.oracle.log_file import read_log, write_log
from hkv.oracle.verbs import check

ROOT = pathlib.Path(__file__).resolve().parents[2]


def recorded(name: str, folder: pathlib.Path) -> pathlib.Path:
    """A log of an engine with a defect, from before the defect had a name."""
    log = read_log(ROOT / "docs" / "upstream-bugs" / f"{name}.jsonl")
    engine = NumpyEngine(with_bugs(log.header, [name]))
    path = folder / f"{name}.jsonl"
    write_log(path, log.header, log.operations, [attempt(engine, operation) for operation in log.operations])
    return path


@pytest.mark.parametrize("name", ["begun-state-under-later-key", "checkpoint-under-later-key"])
def test_the_verdict_names_the_defect(name, tmp_path):
    path = recorded(name, tmp_path)
    (log,) = check([path]).checked
    assert (log.difference, log.known_defects) == (None, (name,))
    assert log.verdict == ("known defect", f"agrees under {name}")
    assert check([path]).agrees
    (named,) = check([path], bugs=[name]).checked
    assert named.verdict == ("agrees", "")
    said = CliRunner().invoke(command, [str(path)])
    assert said.exit_code == 0
    assert f"known defect: {path} agrees under {name}: " in said.output
    assert "0 of 1 logs agree with engine numpy, 1 more under known defects of the engine recorded" in said.output
    assert CliRunner().invoke(command, [str(path), "--fail-on", "known defect"]).exit_code == 1


def test_what_no_known_defect_explains_differs(tmp_path):
    path = recorded("begun-state-under-later-key", tmp_path)
    *lines, last = path.read_bytes().splitlines()
    answered = msgspec.json.decode(last)
    answered["want"]["hit"] += answered["want"]["hit"] or 1
    path.write_bytes(b"\n".join([*lines, msgspec.json.encode(answered)]) + b"\n")
    (log,) = check([path]).checked
    assert log.known_defects == ()
    assert log.difference is not None


def test_defects_may_be_named_in_several_options(tmp_path):
    path = recorded("begun-state-under-later-key", tmp_path)
    options = ["--bugs", "window-one-never-hits", "--bugs", "begun-state-under-later-key"]
    assert "1 of 1 logs agree" in CliRunner().invoke(command, [str(path), *options]).output

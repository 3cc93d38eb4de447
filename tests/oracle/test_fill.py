"""Logs of questions, which an engine answers."""

from __future__ import annotations

import json
import pathlib

import pytest
from click.testing import CliRunner

from hkv.cli.check import command as check
from hkv.contract import registry
from hkv.errors import ConfigError, FileError
from hkv.oracle.log_file import log_bytes
from hkv.oracle.record import Only, features_of, record

QUESTIONS = pathlib.Path(__file__).resolve().parent.parent / "data" / "question_without_answers.jsonl"


def run(*arguments: object) -> str:
    done = CliRunner().invoke(check, [str(each) for each in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def test_questions_are_answered(tmp_path: pathlib.Path) -> None:
    *_, last = map(json.loads, run(QUESTIONS, "--fill", "-").splitlines())
    assert last["want"]["hit"] == 44
    run(QUESTIONS, "--fill", tmp_path / "filled.jsonl")
    assert "1 of 1 logs agree" in run(tmp_path / "filled.jsonl")
    with pytest.raises(FileError, match="hkv check --fill has one answer"):
        run(QUESTIONS)
    with pytest.raises(ConfigError, match="one LOG"):
        run(QUESTIONS, QUESTIONS, "--fill", "-")


@pytest.mark.parametrize("name", registry.names())
def test_answers_that_are_left_out_come_back(name: str, tmp_path: pathlib.Path) -> None:
    dialect, only = registry.dialect_of(name), Only(dialect=name)
    version = dialect.drawn_versions(frozenset())[-1]
    factory = dialect.engine("numpy")
    recording = record(factory, features_of(only)[0], 1, version, 6, only)
    whole = log_bytes(recording.header, recording.operations, recording.answers)
    header, *lines = whole.splitlines()
    asked = [json.dumps({name: value for name, value in json.loads(line).items() if name != "want"}) for line in lines]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([header, *map(str.encode, asked)]) + b"\n")
    filled = run(tmp_path / "a.jsonl", "--fill", "-").splitlines()
    assert list(map(json.loads, filled)) == list(map(json.loads, whole.splitlines()))

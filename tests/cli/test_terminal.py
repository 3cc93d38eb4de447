"""Texts of strangers never reach a terminal as codes, and no number is cut, however narrow it is."""

from __future__ import annotations

import json
import os
import pathlib
import pty
import re
import subprocess
import sys

import pytest

from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.files import printable
from hkv.oracle.log_file import log_bytes
from hkv.oracle.record import record

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

OBEYED = "\x1b]0;title\x07\x1b[31m\x9b2J\r\u202e"

ENGINE = """
from hkv.dialects.vllm.engines.numpy import NumpyEngine

class Engine(NumpyEngine):
    def lookup(self, id):
        raise KeyError("\\x1b[31m\\x9b2J" + id)
"""


def run(*arguments: str, columns: int = 200, terminal: bool = True) -> str:
    """Output and errors of a command, in a terminal of its own, but for the bar of its progress."""
    words = [sys.executable, "-c", "from hkv.cli import main; main()", *arguments]
    leader, follower = pty.openpty()
    shown = follower if terminal else subprocess.PIPE
    environment = {**os.environ, "COLUMNS": str(columns), "PYTHONPATH": str(ROOT), "TERM": "xterm", "NO_COLOR": "1"}
    with subprocess.Popen(words, stdout=shown, stderr=subprocess.PIPE, env=environment) as process:
        os.close(follower)
        found = b""
        if terminal:
            try:
                while part := os.read(leader, 1 << 16):
                    found += part
            except OSError:  # the other end is closed
                pass
        out, errors = process.communicate()
    os.close(leader)
    return (found + (out or b"") + errors).decode().replace("\r\n", "\n")


@pytest.fixture
def log(tmp_path: pathlib.Path) -> str:
    """A log whose ids a terminal would obey, and of which one answer is wrong."""
    recording = record(NumpyEngine, "core", 0, 2, 4)
    text = log_bytes(recording.header, recording.operations, recording.answers).decode()
    text = re.sub(r'"(r\d+)"', lambda found: json.dumps(found[1] + OBEYED), text)
    path = tmp_path / "log.jsonl"
    path.write_text(text.replace('"hit":0', '"hit":1', 1))
    (tmp_path / "engine.py").write_text(ENGINE)
    return str(path)


@pytest.mark.parametrize("terminal", [True, False])
def test_ids_of_strangers_are_escaped(log: str, terminal: bool) -> None:
    engine = str(pathlib.Path(log).with_name("engine.py")) + ":Engine"
    for words in (
        ("check", log),
        ("check", log, "--engine", engine),
        ("explain", log, "--line", "7"),
        ("check", log + OBEYED),
        ("shrink", log, "--engine", engine, "-o", log + ".small"),
    ):
        told = run(*words, terminal=terminal)
        assert "\\x9b" in told, words
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", re.sub(r"\x1b\[[013]m", "", told)), words


def test_printable_keeps_everything_else() -> None:
    assert printable("ä\t…\n界") == "ä\t…\n界"
    assert printable(OBEYED) == "\\x1b]0;title\\x07\\x1b[31m\\x9b2J\\r\\u202e"


def test_a_shell_completes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_HKV_COMPLETE", "bash_source")
    assert "_HKV_COMPLETE=bash_complete" in run(terminal=False)
    monkeypatch.setenv("_HKV_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "hkv diff --know")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert "--known" in run(terminal=False)


def test_a_mistyped_command_is_recognised() -> None:
    assert run("chek", terminal=False) == "hkv: No such command 'chek'. Did you mean 'check'?\n"
    assert run("nothing-like-it", terminal=False) == "hkv: No such command 'nothing-like-it'.\n"


def test_no_number_is_cut_in_a_narrow_terminal() -> None:
    log = str(ROOT / "tests/data/oplogs/eagle-12.jsonl")
    narrow, wide = (run("check", log, "--coverage", columns=columns) for columns in (20, 200))
    numbers = [re.findall(r"│ +(\d+) │ +(\d+) │", text) for text in (narrow, wide)]
    assert numbers[0] == numbers[1] != []

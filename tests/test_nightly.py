"""`.ci/nightly`: all of its commands are run, whatever fails, with options that they have."""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMMAND = ROOT / ".ci" / "nightly"


def run(folder: pathlib.Path, failing: str, *more: str) -> tuple[int, str, list[list[str]]]:
    """Its exit status, last line and commands, with an interpreter that fails at commands that have a word."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\necho "$0 $*" >> {folder}/commands\ncase "$*" in *{failing}*) exit 1;; esac\n')
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python)}
    command = [str(COMMAND), str(folder / "made"), *more]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    commands = (folder / "commands").read_text().splitlines()
    return done.returncode, done.stdout.splitlines()[-1], [shlex.split(line)[1:] for line in commands]


@pytest.mark.parametrize(("failing", "says"), [("no-such-word", "nothing"), ("mutation.py", "mutation")])
def test_everything_is_run_whatever_fails(failing: str, says: str, tmp_path: pathlib.Path) -> None:
    status, last, commands = run(tmp_path, failing, str(tmp_path / "python"))
    assert (status, last) == (int(says != "nothing"), f"failed: {says}")
    assert [" ".join(command[:2]) for command in commands] == [
        f"benchmarks/mutation.py {tmp_path}/made/verdicts",
        "-m tests.mutants",
        "-m tests.mutants",
        "benchmarks/claims.py --vllm-python",
    ]
    assert sorted(path.name for path in (tmp_path / "made").glob("*.log")) == [
        "claims.log",
        "mutants-in-vllm.log",
        "mutants.log",
        "mutation.log",
    ]


def test_its_commands_have_these_options(tmp_path: pathlib.Path) -> None:
    _, _, commands = run(tmp_path, "no-such-word", str(tmp_path / "python"))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for program in {tuple(command[: 2 if command[0] == "-m" else 1]) for command in commands}:
        line = [sys.executable, *program, "--help"]
        said = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
        used = {word for command in commands if tuple(command[: len(program)]) == program for word in command}
        assert {word for word in used if word.startswith("--")} <= set(re.findall(r"--[a-z-]+", said))


def test_without_a_folder_it_is_refused() -> None:
    done = subprocess.run([str(COMMAND)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "usage: .ci/nightly FOLDER [VLLM/bin/python]\n")

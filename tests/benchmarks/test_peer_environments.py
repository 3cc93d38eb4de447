"""`benchmarks/peer_environments.py`: when an environment is kept, when it is made again, and what pip is asked for."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

import pytest

from benchmarks import peer_environments
from benchmarks.peer_environments import PEERS, STAMP, NoPythonError, PeerError, is_complete, make

VLLM = PEERS["vllm"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that would be run, by an environment without pip that is this interpreter's."""
    commands: list[list[str]] = []

    def create(folder, with_pip):
        (folder / "bin").mkdir(parents=True)
        (folder / "pyvenv.cfg").write_text("")
        (folder / "lib").mkdir()
        script = f"#!/bin/sh\ncase $2 in pip) echo torch==2.13.0;; *) echo '{folder / 'lib'}';; esac\n"
        (folder / "bin" / "python").write_text(script)
        (folder / "bin" / "python").chmod(0o755)

    monkeypatch.setattr(peer_environments.venv, "create", create)
    monkeypatch.setattr(peer_environments, "_run", lambda command, variables, timeout: commands.append(command))
    return commands


@pytest.mark.skipif(sys.platform == "win32", reason="the interpreter's stand-in is a shell script")
def test_a_complete_environment_is_kept(asked: list[list[str]], tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "vllm"
    python = make(VLLM, folder)
    assert python == folder / "bin" / "python"
    torch, around, package, trial = (command[1:] for command in asked)
    pip = ["-m", "pip", "install", "--disable-pip-version-check"]
    assert torch == [*pip, "torch==2.13.0"]
    assert around[-1] == "torch==2.13.0"
    assert {"numba==0.65.0", "jax>=0.10.2,<0.12", "hypothesis>=6.120"} <= set(around)
    assert not any("hkv" in requirement for requirement in around)
    assert package == [*pip, "--no-deps", "vllm==0.33.0"]
    assert trial == ["-c", VLLM.trial]
    assert (folder / "lib" / "hkv-checkout.pth").read_text() == f"{peer_environments.ROOT}\n"
    assert json.loads((folder / STAMP).read_text())["packages"] == ["torch==2.13.0"]
    asked.clear()
    assert make(VLLM, folder) == python
    assert asked == []


@pytest.mark.skipif(sys.platform == "win32", reason="the interpreter's stand-in is a shell script")
def test_an_unfinished_or_outdated_environment_is_made_again(asked: list[list[str]], tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "vllm"
    make(VLLM, folder)
    (folder / STAMP).unlink()
    (folder / "left over").write_text("")
    assert not is_complete(VLLM, folder)
    make(VLLM, folder)
    assert not (folder / "left over").exists()
    newer = dataclasses.replace(VLLM, package=("vllm==0.34.0",))
    assert is_complete(VLLM, folder)
    assert not is_complete(newer, folder)
    assert not is_complete(VLLM, folder, ["--pre"])
    (folder / STAMP).write_text("half a sta")
    assert not is_complete(VLLM, folder)


@pytest.mark.skipif(sys.platform == "win32", reason="the interpreter's stand-in is a shell script")
def test_a_step_that_fails_leaves_no_stamp(
    asked: list[list[str]], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_at_the_trial(command, variables, timeout):
        if command[1] == "-c":
            raise PeerError("the trial failed")

    monkeypatch.setattr(peer_environments, "_run", fail_at_the_trial)
    with pytest.raises(PeerError, match="the trial failed"):
        make(VLLM, tmp_path / "vllm")
    assert not (tmp_path / "vllm" / STAMP).exists()


@pytest.mark.parametrize("stand_in", [None, "exit 127"])
def test_a_python_that_does_not_run_is_said_before_anything_is_removed(stand_in, tmp_path, monkeypatch) -> None:
    if stand_in:
        (tmp_path / "python3.12").write_text(f"#!/bin/sh\n{stand_in}\n")
        (tmp_path / "python3.12").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = tmp_path / "kept"
    folder.mkdir()
    (folder / "pyvenv.cfg").write_text("")
    with pytest.raises(NoPythonError, match=r"not made: no python3\.12 on the path that runs"):
        make(PEERS["tokamax"], folder)
    assert (folder / "pyvenv.cfg").exists()

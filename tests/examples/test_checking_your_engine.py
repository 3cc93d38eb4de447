"""What `docs/checking-your-engine.md` shows is what happens."""

from __future__ import annotations

import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

import hkv.oracle
from hkv.oracle.engine import Engine
from hkv.oracle.engines import engine_factory
from hkv.oracle.record import Only, draw

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TEXT = (ROOT / "docs" / "checking-your-engine.md").read_text()


def commands() -> list[tuple[str, list[str]]]:
    """Every command of the document, with the lines of output that follow it."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


def test_every_command_prints_what_it_says(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    assert len(commands()) == 7
    for command, expected in commands():
        words = shlex.split(command)
        if shutil.which("gcc") is None and (words[0] == "gcc" or "cmd:./my-engine,numpy" in words):
            continue
        program = [sys.executable, "-m", "hkv"] if words[0] == "hkv" else words[:1]
        done = subprocess.run([*program, *words[1:]], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.stderr == "", command
        for line in expected:
            assert line in done.stdout.splitlines(), (command, done.stdout)
        assert done.returncode == (1 if "WrongEngine" in command else 0), command


def test_the_wrong_engine_is_diagnosed(tmp_path: pathlib.Path) -> None:
    arguments = ["diff", "--engines", "examples/wrong_engine.py:WrongEngine,numpy", "--kinds", "full_attention"]
    arguments += ["--max-groups", "1", "--version", "1", "--feature", "core"]
    done = subprocess.run([sys.executable, "-m", "hkv", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "core seed 2 version 1: line 8: lookup id=r4" in done.stdout
    assert (
        "broken invariant: index\n    line 7, after allocate r3: block 1 holds the first 2 tokens of r3" in done.stdout
    )
    assert "7 operations, shrunk from 70" in done.stdout
    assert len((ROOT / "examples" / "wrong_engine.py").read_text().splitlines()) <= 64


def test_the_methods_are_those_of_an_engine() -> None:
    shown = set(re.findall(r"    def (\w+)\(self", TEXT)) - {"__init__"}
    assert shown == {name for name in vars(Engine) if not name.startswith("_")}
    header = draw("core", 0, 1, Only(frozenset({"full_attention"}), 1))[0]
    factory = engine_factory(str(ROOT / "examples" / "toy_engine.py") + ":ToyEngine")
    assert isinstance(factory(header), Engine)


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)", TEXT):
        assert (ROOT / "docs" / target).exists(), target


def test_the_python_that_is_shown_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    (shown,) = (block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "differ(" in block)
    space: dict = {}
    exec(shown, space)
    assert len(space["recording"].operations) > 70


def test_what_is_public_is_there() -> None:
    for name in hkv.oracle.__all__:
        assert getattr(hkv.oracle, name).__module__.startswith(("hkv.oracle", "collections", "typing")), name
    assert set(hkv.oracle.__all__) <= set(dir(hkv.oracle))
    with pytest.raises(AttributeError, match="nothing"):
        _ = hkv.oracle.nothing

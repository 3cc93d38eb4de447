"""The engine in C++ under RTP-LLM's rules is built and agrees with the reference; mistakes planted in it are named."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest
from click.testing import CliRunner

from hkv.cli.check import command as check
from hkv.cli.diff import command as diff
from hkv.cli.record import command as record

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent.parent / "examples"
SOURCE = EXAMPLES / "rtp_engine" / "engine.cc"

MISTAKES = {
    "rtp hit": ("hits + 1 < (int)first.keys.size()", "hits < (int)first.keys.size()"),
    "after insert": ("    if (use(key) != nullptr) return;", "    use(key);"),
    "rtp version": ("    version++;", ""),
    "rtp order of blocks": ("take_over(sequence, *unheld.begin())", "take_over(sequence, *unheld.rbegin())"),
    "rtp adoption": ("items.splice(items.end(), items, found)", "items.splice(items.begin(), items, found)"),
    "verdict is internal_error": ("need + reserve_blocks > available()", "need > available()"),
}
"""Edits of the engine's text, each by what the first line says of it."""


def built(folder: pathlib.Path, text: str) -> str:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to build the engine in C++ with")
    (folder / "rtp_engine").mkdir(exist_ok=True)
    shutil.copytree(EXAMPLES / "c_engine", folder / "c_engine", dirs_exist_ok=True)
    source, program = folder / "rtp_engine" / "engine.cc", folder / "rtp-engine"
    source.write_text(text)
    line = [compiler, "-Wall", "-Wextra", "-Werror", "-o", program, source]
    subprocess.run([*line, "-x", "c", folder / "c_engine" / "json.c"], check=True)
    return f"cmd:{program}"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> str:
    return built(tmp_path_factory.mktemp("rtp"), SOURCE.read_text())


SINGLE = ["--dialect", "rtp-llm/single", "--feature", "core"]


def test_it_agrees_with_the_reference(engine: str) -> None:
    done = CliRunner().invoke(diff, [*SINGLE, "--engines", f"numpy,{engine}", "--seeds", "40"])
    assert done.exit_code == 0, done.output
    assert "no difference" in done.output
    assert "not implemented" not in done.output


def test_logs_that_it_recorded_are_the_references(engine: str, tmp_path: pathlib.Path) -> None:
    log = str(tmp_path / "core.jsonl")
    assert CliRunner().invoke(record, [*SINGLE, "--engine", engine, "--seed", "3", "-o", log]).exit_code == 0
    for checked in ("numpy", engine):
        done = CliRunner().invoke(check, [log, "--engine", checked])
        assert done.exit_code == 0, done.output


def test_it_says_what_it_does_not_implement(engine: str) -> None:
    line = ["--dialect", "rtp-llm/single", "--engines", f"{engine},numpy", "--seeds", "3"]
    done = CliRunner().invoke(diff, line)
    assert done.exit_code == 0, done.output
    assert "not implemented" in done.output


@pytest.mark.parametrize("said", MISTAKES)
def test_a_planted_mistake_is_found_and_made_small(said: str, tmp_path: pathlib.Path) -> None:
    before, after = MISTAKES[said]
    text = SOURCE.read_text()
    assert text.count(before) == 1
    wrong = built(tmp_path, text.replace(before, after))
    saved = tmp_path / "differences"
    line = [*SINGLE, "--engines", f"{wrong},numpy", "--seeds", "20", "--save", str(saved)]
    done = CliRunner().invoke(diff, line)
    assert done.exit_code == 1, done.output
    assert said in done.output.splitlines()[0]
    (case, *_) = saved.iterdir()
    assert len(case.read_text().splitlines()) <= 12
    assert CliRunner().invoke(check, [str(case), "--engine", wrong]).exit_code == 1

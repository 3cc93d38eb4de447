"""Accounts of engines that break an invariant by themselves: a small case, a log, a page, a command."""

from __future__ import annotations

import pathlib
import re
import sys
from typing import Any

import pytest
from click.testing import CliRunner

from hkv.cli.watch import command as watch
from hkv.contract.invariant import InvariantError
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.oracle.record import Only
from hkv.testing import engine_machine, run_watched

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent.parent / "examples"
ONE_FULL: dict[str, Any] = {"features": ["core"], "kinds": ["full_attention"], "max_groups": 1, "version": 1}


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The toy engine with one line missing."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield __import__("wrong_engine").WrongEngine
    sys.modules.pop("wrong_engine")


class Falls(NumpyEngine):
    """Raises an error of its own at a request of many tokens."""

    def request(self, id: str, tokens: Any, extra: Any, keys: Any = None) -> None:
        if len(tokens) > 3:
            raise KeyError(id)
        super().request(id, tokens, extra, keys)


def told(error: BaseException, invariant: str) -> None:
    """Makes sure of the account in an error's note, and that its command repeats it."""
    note = error.__notes__[0]
    lines = note.splitlines()
    assert f": {invariant}: " in lines[0]
    assert f"  broken invariant: {invariant}" in lines
    (count,) = re.findall(r"^  (\d+) operations?", note, re.MULTILINE)
    assert int(count) <= 6
    assert pathlib.Path(re.findall(r"^  page    (.*)$", note, re.MULTILINE)[0]).stat().st_size > 1000
    (again,) = re.findall(r"^  again   hkv watch (.*) --log (.*)$", note, re.MULTILINE)
    done = CliRunner().invoke(watch, [again[0], "--log", again[1]])
    assert done.exit_code == 1, done.output
    assert f"broken invariant: {invariant}" in done.output
    assert "again   hkv watch" in done.output


def test_random_traffic_is_made_small_and_saved(wrong: Any, tmp_path: pathlib.Path) -> None:
    with pytest.raises(InvariantError, match="index: after allocate") as caught:
        run_watched(wrong, **ONE_FULL, save=tmp_path)
    told(caught.value, "index")
    assert caught.value.__notes__[0].startswith("core seed 0 version 1: index: ")
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".html", ".jsonl"]


def test_an_error_of_the_engine_is_told_alike(tmp_path: pathlib.Path) -> None:
    with pytest.raises(KeyError) as caught:
        run_watched(Falls, **ONE_FULL, save=tmp_path)
    told(caught.value, "failure")


def test_a_state_machine_gives_the_same_account(wrong: Any) -> None:
    only = Only(kinds=frozenset({"full_attention"}), max_groups=1)
    case = engine_machine(wrong, features=["core"], version=1, only=only).TestCase
    with pytest.raises(InvariantError) as caught:
        case().runTest()
    told(caught.value, "index")


INTERRUPTED = """
import wrong_engine, toy_engine
made = 0

class Engine(toy_engine.ToyEngine):
    def __init__(self, header):
        global made
        made += 1
        if made > 3:
            raise KeyboardInterrupt
        super().__init__(header)
"""


def test_an_interrupted_watch_says_how_far_it_came(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    (tmp_path / "engine.py").write_text(INTERRUPTED)
    how = [f"{tmp_path}/engine.py:Engine", "--kinds", "full_attention", "--max-groups", "1", "--version", "1"]
    done = CliRunner().invoke(watch, [*how, "--feature", "core", "--seeds", "400"])
    assert "no invariant is broken in the first 3 seeds, until it was interrupted" in done.output
    assert "400" not in done.output
    done = CliRunner().invoke(watch, [*how, "--feature", "core", "--seeds", "400", "--json", str(tmp_path / "a.json")])
    assert '"holds": null' in (tmp_path / "a.json").read_text()

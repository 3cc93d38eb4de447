"""Commands and code that `docs/checking-your-engine.md` shows do what it says."""

from __future__ import annotations

import pathlib
import re
import shlex
import shutil
import subprocess
import unittest

import pytest
from click.testing import CliRunner
from hypothesis import Phase, settings

from benchmarks.quoted.console import CUT, difference, shown_in
from hkv.cli.diff import command as diff
from hkv.dialects import vllm
from hkv.dialects.vllm import Engine
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.log.structs import Header
from hkv.errors import ConfigError
from hkv.oracle.engine import flags_for
from hkv.oracle.engines import engine_factory
from hkv.oracle.record import Only, draw
from hkv.oracle.verbs import check
from tests.cli.commands import perform

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TEXT = (ROOT / "docs" / "checking-your-engine.md").read_text()


def test_every_command_prints_what_it_says(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    commands = shown_in(TEXT)
    assert len(commands) == 9
    for shown in commands:
        command, words = shown.command, shlex.split(shown.command)
        if shutil.which("gcc") is None and (words[0] == "gcc" or "cmd:./my-engine,numpy" in words):
            continue
        if words[0] == "hkv":
            done = perform(words[1:], tmp_path)
            status, out = done.status, done.out.decode()
        else:
            program = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
            status, out = program.returncode, program.stdout
        assert capfd.readouterr().err == "", command
        assert (problem := difference(shown, out)) is None, problem
        assert status == (1 if "WrongEngine" in command else 0), command


def test_the_wrong_engine_is_short_and_its_diagnosis_shown() -> None:
    (shown,) = (
        each for each in shown_in(TEXT) if each.command.startswith("hkv diff") and "WrongEngine" in each.command
    )
    assert "  broken invariant: index" in shown.output
    assert CUT not in shown.output
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
    (shown,) = (block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "hkv.diff(" in block)
    space: dict = {}
    exec(shown, space)
    assert space["found"].operations > 70


def test_the_state_machine_that_is_shown_runs_and_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    (shown,) = (block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "engine_machine(" in block)
    assert ran(shown, 40).wasSuccessful()
    wrong = ran(shown.replace("toy_engine import ToyEngine", "wrong_engine import WrongEngine as ToyEngine"), 200)
    ((_, said),) = wrong.failures
    assert "InvariantError: index: after " in said


def ran(shown: str, most: int) -> unittest.TestResult:
    """Result of a test case that a document shows, of so many examples at most: the first that fails is enough."""
    space: dict = {}
    exec(shown, space)
    case = space["TestToyEngine"]
    case.settings = settings(
        max_examples=most, stateful_step_count=30, phases=[Phase.generate], report_multiple_bugs=False
    )
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    return result


def test_an_engine_of_one_group_is_told_its_flags() -> None:
    engines = ["--engines", f"{ROOT / 'examples' / 'toy_engine.py'}:ToyEngine,numpy"]
    none = CliRunner().invoke(diff, [*engines, "--seeds", "2", "--feature", "eagle"])
    assert isinstance(none.exception, ConfigError)
    _, _, flags = str(none.exception).partition("configurations that are can be drawn with ")
    assert flags.startswith("--kinds full_attention --max-groups 1 --version 1 --feature core")
    done = CliRunner().invoke(diff, [*engines, "--seeds", "4", "--steps", "4", *flags.split()])
    assert (done.exit_code, "most are not implemented" in done.output) == (0, False), done.output
    few = CliRunner().invoke(diff, [*engines, "--seeds", "250", "--steps", "1", "--feature", "core"])
    assert few.exit_code == 0, few.output
    assert few.output.endswith(f"most are not implemented; configurations that are can be drawn with {flags}\n")


def test_flags_are_those_of_what_an_engine_can_be_made_of() -> None:
    def windows_only(header: Header) -> NumpyEngine:
        if header.groups[0]["kind"] != "sliding_window":
            raise RuntimeError("not implemented")
        return NumpyEngine(header)

    assert flags_for(windows_only, "vllm-0.33").startswith("--kinds sliding_window --max-groups 1 --feature core")
    assert flags_for(engine_factory("numpy"), "rtp-llm/single") == "--kinds FULL --max-groups 1"
    assert flags_for(lambda header: 1 // 0, "vllm-0.33") == ""


def test_what_an_engine_needs_is_there() -> None:
    for name in vllm.__all__:
        assert getattr(vllm, name).__module__.startswith("hkv.dialects.vllm."), name
    assert set(vllm.__all__) <= set(dir(vllm))
    with pytest.raises(AttributeError, match="nothing"):
        _ = vllm.nothing


def test_the_sample_log_differs_where_its_engine_hits_a_stale_key() -> None:
    (log,) = check([ROOT / "examples" / "data" / "stale_key.jsonl"]).checked
    assert log.difference is not None
    assert (log.difference.line, log.difference.field, log.difference.want, log.difference.got) == (8, "hit", 2, 0)

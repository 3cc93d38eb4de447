"""`hkv mutants`: the table, the files, the exit status, bad names."""

from __future__ import annotations

import json
import subprocess
import sys

from click.testing import CliRunner

from hkv.cli import COMMANDS
from hkv.cli import mutants as command_module
from hkv.cli.mutants import command, markdown_table
from hkv.errors import ConfigError, MissingExtraError
from hkv.testing.mutants import MUTANTS, Verdict, judge


def test_one_mutant_is_judged_and_written(tmp_path):
    path, page = tmp_path / "kills.json", tmp_path / "kills.md"
    arguments = ["--only", "taken-from-the-back", "--json", str(path), "--markdown", str(page), "--cases"]
    result = CliRunner().invoke(command, arguments, standalone_mode=False)
    assert result.return_value == 0
    assert "eviction order" in result.output
    assert '{"op":' in result.output
    written = json.loads(path.read_text())
    assert written["summary"]["killed"] == written["summary"]["mutants"] == 1
    assert written["mutants"][0]["invariant"] == "eviction order"
    assert written["mutants"][0]["upstream"] == list(MUTANTS["taken-from-the-back"].upstream)
    assert "| `taken-from-the-back` |" in page.read_text()


def test_json_on_standard_output_is_all_there_is():
    result = CliRunner().invoke(command, ["--only", "taken-from-the-back", "--json", "-"], standalone_mode=False)
    assert json.loads(result.output)["summary"]["survivors"] == []


def test_a_suite_whose_package_is_missing_lets_nothing_survive(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    result = CliRunner().invoke(command, ["--only", "damage-goes-unnoticed"], standalone_mode=False)
    assert isinstance(result.exception, MissingExtraError)
    assert "hkv[disk]" in str(result.exception)


EXTRAS = ("safetensors", "zmq", "matplotlib", "blake3", "xxhash", "hypothesis")

BASE_INSTALL = f"""
import sys
sys.modules.update(dict.fromkeys({EXTRAS}))  # as if they were not installed
import click
from hkv.cli import COMMANDS, cli
print(*(name for name in COMMANDS if cli.get_command(click.Context(cli), name)))
"""


def test_every_command_comes_up_without_any_extra():
    done = subprocess.run([sys.executable, "-c", BASE_INSTALL], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.split() == list(COMMANDS)


def test_a_survivor_gives_exit_status_one(monkeypatch):
    survivor = Verdict(MUTANTS["taken-from-the-back"], None, "", 5, 0.1, 0, ())
    monkeypatch.setattr(command_module, "judge", lambda *_: survivor)
    result = CliRunner().invoke(command, ["--only", "taken-from-the-back"], standalone_mode=False)
    assert result.return_value == 1
    assert "Survivors: taken-from-the-back" in result.output


def test_a_sample_is_the_same_for_the_same_seed():
    first = command_module.choose((), 5, 3)
    assert first == command_module.choose((), 5, 3) != command_module.choose((), 5, 4)
    assert len(first) == 5


def test_an_unknown_name_is_refused():
    result = CliRunner().invoke(command, ["--only", "no-such-mutant"], standalone_mode=False)
    assert isinstance(result.exception, ConfigError)
    assert "no-such-mutant" in str(result.exception)


def test_the_page_says_which_command_writes_it():
    page = markdown_table([judge(MUTANTS["taken-from-the-back"])])
    assert "hkv mutants --markdown docs/mutants.md" in page
    assert "## Eviction" in page

"""`python -m tests.mutants`: the table, the files, the exit status, bad names, what shows nothing."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
from click.testing import CliRunner, Result

from hkv.errors import MissingExtraError
from tests.mutants import __main__ as command_module
from tests.mutants.catalogue import MUTANTS
from tests.mutants.row import Verdict
from tests.mutants.suite_judge import judge

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
ONE = ("--only", "taken-from-the-back")


def invoke(*arguments: str) -> Result:
    """The command in this process; its rows must be judged by suites, as JAX may have been used here."""
    return CliRunner().invoke(command_module.command, arguments)


def apart(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a process that has not used JAX yet, as judging defects by tests needs."""
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)


def test_one_mutant_is_judged_and_written(tmp_path):
    path, page = tmp_path / "kills.json", tmp_path / "kills.md"
    result = invoke(*ONE, "--json", str(path), "--markdown", str(page), "--cases")
    assert result.exit_code == 0
    assert "eviction order" in result.output
    assert '{"op":' in result.output
    written = json.loads(path.read_text())
    assert written["summary"]["killed"] == written["summary"]["mutants"] == 1
    assert written["mutants"][0]["invariant"] == "eviction order"
    assert written["mutants"][0]["upstream"] == list(MUTANTS["taken-from-the-back"].upstream)
    assert "| `taken-from-the-back` |" in page.read_text()


def test_a_suite_whose_package_is_missing_lets_nothing_survive(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    result = invoke("--only", "damage-goes-unnoticed")
    assert isinstance(result.exception, MissingExtraError)
    assert "hkv[disk]" in str(result.exception)


def test_a_survivor_gives_exit_status_one(monkeypatch):
    survivor = Verdict(MUTANTS["taken-from-the-back"], "lives", None, "", 0.1, 5, 0)
    monkeypatch.setattr(command_module.suite_judge, "judge", lambda *_: survivor)
    result = invoke(*ONE)
    assert result.exit_code == 1
    assert "Survivors: taken-from-the-back" in result.output


def test_an_interrupt_leaves_what_was_judged(monkeypatch):
    calls = iter([judge])  # the second has nothing to call

    def once(*arguments):
        for real in calls:
            return real(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(command_module.suite_judge, "judge", once)
    result = invoke(*ONE, "--only", "released-twice")
    assert result.exit_code == command_module.INTERRUPTED
    assert "1 of 1 mutants killed" in result.output


@pytest.mark.parametrize("option", [("--only", "eviction"), ("--only", "host", "--only", "released-twice"), ()])
def test_the_list_has_what_would_be_judged(option):
    rows = invoke("--list", *option).output.splitlines()
    assert [line.split()[2] for line in rows] == [row.name for row in command_module.choose(option[1::2])]
    assert len(rows) > 5


@pytest.mark.parametrize("name", ["no-such-mutant", ""])
def test_an_unknown_name_is_refused(name):
    result = invoke("--only", name)
    assert result.exit_code == 2
    assert f"'{name}' is no mutant" in result.output


def test_a_test_judges_in_a_process_of_its_own():
    ran = apart("-m", "tests.mutants", "--only", "hit-stays-queued", "--only", "taken-from-the-back", "--json", "-")
    assert ran.returncode == 0, ran.stderr[-2000:]
    rows = json.loads(ran.stdout)["mutants"]
    assert [row["name"] for row in rows] == ["taken-from-the-back", "hit-stays-queued"]
    assert rows[1]["invariant"] == "properties/invariant_traffic: keeps [conservation]"
    assert rows[1]["problem"].startswith("conservation: ")


HARMLESS = """
from hkv.testing.planting import Patch
from tests.mutants import process_judge, table
from tests.mutants.row import Planted
process_judge.prepare()
convert = "pallas_kernels.move.moves:saturated"
clipped = "jnp.minimum(jnp.maximum(scaled, -most), most)"
def row(name, text, defect):
    return Planted(name, "x", (Patch(convert, text, defect),), "tests.paged.test_step:test_per_tensor")
rows = [
    row("harmless", clipped, f"1 * {clipped}"),
    row("no-python-there", "(rounded(", "(jnp.no_such_function("),
    row("killed", "(rounded(", "(jnp.floor("),
    row("asleep", "clipped = jnp", "__import__('os')._exit(3); clipped = jnp"),
]
verdicts = [process_judge.judge(row) for row in rows]
print([verdict.outcome for verdict in verdicts])
print(table.in_words(verdicts))
"""


def test_who_lives_and_what_shows_nothing_is_reported():
    ran = apart("-c", HARMLESS)
    lines = ran.stdout.splitlines()
    assert lines[0] == "['lives', 'broken', 'killed', 'no answer']", ran.stderr[-2000:]
    assert lines[1] == "1 of 4 mutants killed. Survivors: harmless, no-python-there, asleep."

"""Defects planted in an installed engine: every edit fits, a sample is found and named, the page lists them."""

from __future__ import annotations

import pathlib
import re

import pytest
from click.testing import CliRunner

from tests.mutants import __main__ as command_module
from tests.mutants.catalogue import IN_PACKAGES, MUTANTS
from tests.mutants.row import DIFF, Planted, Verdict
from tests.mutants.suite_judge import judge_by_diff
from tests.mutants.table import package_table, record, recorded

PAGE = pathlib.Path(__file__).resolve().parent.parent.parent / "docs" / "tables" / "mutants-in-vllm.md"
ROWS = {row.name: row for row in IN_PACKAGES["vllm"]}
NAMED = (
    *("eagle-drop-forgotten", "state-reused-before-it-is-computed", "freed-under-a-step-in-flight"),
    *("adapters-share-keys", "wrong-hash-for-a-block", "cached-count-survives-preemption"),
)
"""Defects whose report named another cause before invariants were asked beyond the first difference."""

foreign_warnings = pytest.mark.filterwarnings("ignore")  # what vLLM and torch say when they are imported


@pytest.mark.parametrize(("package", "least"), [("vllm", 40), ("sglang", 20), ("vllm-offload", 20)])
def test_every_row_says_what_it_is(package: str, least: int) -> None:
    rows = {row.name: row for row in IN_PACKAGES[package]}
    assert len(rows) >= least
    assert len({row.edits for row in rows.values()}) == len(rows)
    assert not rows.keys() & {name for name, row in MUTANTS.items() if row.judge == DIFF}
    for name, row in rows.items():
        assert row.judge == DIFF, name
        assert row.wrong, name
        assert row.expected, name
        assert all(edit.target.startswith(package.partition("-")[0] + ".") for edit in row.edits), name


def test_the_page_lists_rows_and_counts_those_that_are_named() -> None:
    page = PAGE.read_text()
    listed = dict(re.findall(r"^\| `([\w-]+)` (\|.*)$", page, re.MULTILINE))
    named = {name for name, line in listed.items() if "| **" not in line}
    assert set(NAMED) <= named <= set(ROWS)
    assert f"\n{len(named)} of {len(listed)} found in " in page
    assert all(f"| {ROWS[name].wrong}" in line for name, line in listed.items())
    graded = {name: line.rpartition(" | ")[2].removesuffix(" |") for name, line in listed.items()}
    assert all(graded[name] == (ROWS[name].reader or "-") for name in listed)
    assert sum(grade in ("cause", "effect") for grade in graded.values()) >= 60


def test_a_report_that_does_not_name_the_cause_is_no_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS["eagle-drop-forgotten"]
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.33.0")
    verdicts = [Verdict(row, outcome, "x", "a | b", 1.0, 3, 4) for outcome in ("killed", "misread")]
    page = package_table(verdicts, "vllm")
    assert "1 of 2 found" in page
    assert "| 3 | 1.0 | 4 | a \\| b |" in page
    assert "**misread** a \\| b |" in page


def test_rows_that_were_judged_before_stand_beside_those_judged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [ROWS["eagle-drop-forgotten"], ROWS["salt-forgotten"]]
    before = [Verdict(row, "killed", "x", "a | b", 1.0, 3, 4, ("step",)) for row in rows]
    assert recorded([record(verdict) for verdict in reversed(before)], rows) == before
    assert recorded([], rows) == []
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.33.0")
    assert "after the others: `salt-forgotten`." in package_table(before, "vllm", ["salt-forgotten"])


def test_only_rows_of_the_target_can_be_chosen() -> None:
    listed = CliRunner().invoke(command_module.command, ["--target", "vllm", "--list"]).output.splitlines()
    assert [line.split()[2] for line in listed] == list(ROWS)
    refused = CliRunner().invoke(command_module.command, ["--target", "vllm", "--only", "taken-from-the-back"])
    assert refused.exit_code == 2
    assert "'taken-from-the-back' is no mutant" in refused.output


@pytest.mark.vllm
@foreign_warnings
def test_every_edit_fits_the_installed_package() -> None:
    for row in (*ROWS.values(), *IN_PACKAGES["vllm-offload"]):
        for edit in row.edits:
            edit.code()


@pytest.mark.sglang
@foreign_warnings
@pytest.mark.parametrize("row", IN_PACKAGES["sglang"], ids=lambda row: row.name)
def test_a_defect_in_sglang_is_found_and_made_small(row: Planted) -> None:
    verdict = judge_by_diff(row)
    assert verdict.killed, verdict.problem
    assert verdict.size <= 12


@pytest.mark.vllm
@foreign_warnings
@pytest.mark.parametrize("name", ["second-reader-not-counted", "state-in-the-next-column"])
def test_a_defect_in_offloading_is_found_and_made_small(name: str) -> None:
    verdict = judge_by_diff(next(row for row in IN_PACKAGES["vllm-offload"] if row.name == name))
    assert verdict.killed, verdict.problem
    assert verdict.size <= 12


@pytest.mark.vllm
@foreign_warnings
@pytest.mark.parametrize("name", NAMED)
def test_a_defect_is_found_made_small_and_named(name: str) -> None:
    verdict = judge_by_diff(ROWS[name])
    assert verdict.killed, verdict.problem
    assert verdict.size <= 12

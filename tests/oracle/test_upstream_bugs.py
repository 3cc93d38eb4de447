"""`docs/upstream-bugs.md`: every known defect is told, with something that shows it."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

from benchmarks.quoted.console import CUT, Shown, difference, shown_in
from hkv import chunks
from hkv.dialects.vllm import bugs as vllm
from hkv.oracle.check import Difference, check_log
from hkv.oracle.engines import engine_factory
from hkv.oracle.log_file import read_log
from tests.oracle.test_installed_vllm import foreign_warnings

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "upstream-bugs.md").read_text()
LOGS = sorted((DOCS / "upstream-bugs").glob("*.jsonl"))
SCRIPTS = ("planning", "chunks")
BUGS = {**vllm.BUGS, **chunks.BUGS}


def told_by(script: str) -> Shown:
    """Output of a script as the page shows it."""
    (found,) = (shown for shown in shown_in(PAGE) if shown.command == f"python docs/upstream-bugs/{script}.py")
    return found


def test_every_defect_is_shown_once() -> None:
    shown = [path.stem for path in LOGS]
    for script in SCRIPTS:
        shown += [line for line in told_by(script).output if re.fullmatch(r"[a-z-]+", line)]
    assert sorted(shown) == sorted(BUGS)
    for path in LOGS:
        assert f"`{path.stem}`" in PAGE


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_print_what_the_page_says(script: str) -> None:
    command = [sys.executable, str(DOCS / "upstream-bugs" / f"{script}.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (problem := difference(told_by(script), done.stdout)) is None, problem
    assert CUT not in told_by(script).output
    for contract, defect in re.findall(r"contract: (.*)\n  defect:   (.*)", done.stdout):
        assert contract != defect


@pytest.mark.parametrize("path", LOGS, ids=[path.stem for path in LOGS])
def test_logs_keep_the_contract_and_show_the_defect(path: pathlib.Path) -> None:
    log = read_log(path)
    assert len(log.operations) <= 8
    assert check_log(log, engine_factory("numpy")) is None
    found = check_log(log, engine_factory("numpy"), [path.stem])
    assert isinstance(found, Difference)
    assert found.line == len(log.operations) + 1
    others = [name for name in vllm.BUGS if name != path.stem]
    assert check_log(log, engine_factory("numpy"), others) is None


def test_the_compiled_cache_fails_at_the_line_that_does_it() -> None:
    (path,) = (path for path in LOGS if path.stem == "plan-outlives-refusal")
    log = read_log(path)
    assert check_log(log, engine_factory("jax")) is None
    found = check_log(log, engine_factory("jax"), [path.stem])
    assert isinstance(found, Difference)
    assert (found.line, found.operation) == (len(log.operations) + 1, "commit")


@pytest.mark.vllm
@foreign_warnings
@pytest.mark.parametrize("path", LOGS, ids=[path.stem for path in LOGS])
def test_vllm_differs_at_the_last_line(path: pathlib.Path) -> None:
    log = read_log(path)
    found = check_log(log, engine_factory("vllm"))
    assert isinstance(found, Difference)
    assert found.line == len(log.operations) + 1

"""The same examples at every run, whatever was loaded before; campaigns draw anew, and say how to repeat it."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def run(*arguments: str, **variables: str) -> str:
    """Output of a Python process, with these environment variables."""
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "HKV_HYPOTHESIS_PROFILE")}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def draws(*modules: str, **variables: str) -> str:
    found = run("-m", "tests.deterministic_draws", *modules, **variables).strip()
    assert re.fullmatch("[0-9a-f]{64}", found), found
    return found


def test_examples_are_the_same_at_every_run() -> None:
    first = draws(PYTHONHASHSEED="1")
    modules = ("tests.mutants.catalogue", "hkv.dialects.vllm.planning", "tests.chunks.test_transfer")
    assert draws(*modules, PYTHONHASHSEED="2", CI="1") == first


FAILING = """
from hypothesis import given
from hypothesis import strategies as st

@given(st.integers(0, 1 << 60))
def test_small(number):
    print(number)
    assert number < 1 << 59
"""


def test_a_campaign_says_how_to_repeat_what_it_finds(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "test_small.py"
    path.write_text(FAILING)

    def campaign(*options: str) -> str:
        arguments = ["-q", "-p", "tests.conftest", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", *options]
        return run("-m", "pytest", *arguments, str(path), HKV_HYPOTHESIS_PROFILE="campaign")

    first = campaign()
    command = r"HKV_HYPOTHESIS_PROFILE=campaign python -m pytest (--hypothesis-seed=\d+) 'test_small.py::test_small'"
    named = re.search("to repeat a failure: " + command, first)
    assert named is not None, first
    assert "reproduce_failure" in first
    assert numbers(campaign(named[1])) == numbers(first)
    assert numbers(campaign("--hypothesis-seed=7")) != numbers(first)


def numbers(output: str) -> list[str]:
    """The examples of a run."""
    return re.findall(r"^\d+$", output, re.MULTILINE)

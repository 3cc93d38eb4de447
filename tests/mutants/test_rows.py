"""Rows fit the code and name tests that there are; a fixed sample of them is killed; whoever lives is reported."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from tests.mutants.rows import ROWS, choose

EVERY = choose()
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What judges defects, in a process that has not used JAX yet."""
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("row", EVERY, ids=[row.name for row in EVERY])
def test_a_row_fits_the_code_and_names_a_property(row) -> None:
    row.patch.code()
    assert callable(row.property())


def test_every_part_has_defects_of_its_own() -> None:
    assert len({(row.function, row.text, row.defect) for row in EVERY}) == len(EVERY)
    assert len({row.name for row in EVERY}) == sum(map(len, ROWS.values())) == len(EVERY)
    assert {target: len(rows) >= 12 for target, rows in ROWS.items()} == dict.fromkeys(ROWS, True)


def test_the_sample_is_killed() -> None:
    ran = command("-m", "tests.mutants", "--sample")
    assert ran.returncode == 0, ran.stdout + ran.stderr[-2000:]
    sample = choose(sample=True)
    assert {row.target for row in sample} == set(ROWS)
    assert f"{len(sample)} of {len(sample)} planted defects killed" in ran.stdout


HARMLESS = """
import dataclasses, sys
from tests.mutants import __main__ as command, judging
judging.prepare()
from tests.mutants.row import Planted
judge = "tests.paged.test_quantization:test_per_tensor"
convert = "hkv.paged.quantization:_convert"
clipped = "jnp.clip(scaled, -largest, largest)"
rows = [
    Planted("harmless", convert, clipped, f"1 * {clipped}", judge),
    Planted("no-python-there", convert, "jnp.round(without", "jnp.no_such_function(without", judge),
    Planted("killed", convert, "jnp.round(without", "jnp.floor(without", judge),
    Planted("asleep", convert, "jnp.round(clipped)", "__import__('os')._exit(3)", judge),
]
verdicts = [judging.judge(row) for row in rows]
print([verdict.outcome for verdict in verdicts])
print(command.in_words(verdicts))
"""


def test_who_lives_and_what_shows_nothing_is_reported() -> None:
    ran = command("-c", HARMLESS)
    lines = ran.stdout.splitlines()
    assert lines[0] == "['lives', 'broken', 'killed', 'no answer']", ran.stderr[-2000:]
    assert lines[1].startswith("1 of 4 planted defects killed in")
    assert lines[1].endswith("Not killed: harmless, no-python-there, asleep.")


def test_an_unknown_name_is_refused() -> None:
    ran = command("-m", "tests.mutants", "--name", "no-such-defect")
    assert ran.returncode == 2
    assert "no-such-defect is neither a target nor a defect" in ran.stderr


def test_the_page_lists_every_row() -> None:
    page = (ROOT / "docs" / "planted.md").read_text()
    for row in EVERY:
        assert f"| `{row.name}` | `{row.function}` |" in page, row.name
    assert f"{len(EVERY)} of {len(EVERY)} planted defects killed" in page
    assert f" {len(EVERY)} one-line defects" in (ROOT / "README.md").read_text()

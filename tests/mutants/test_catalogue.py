"""Every patch of the catalogue fits; a sample of the published bugs is caught; the page says what there is."""

from __future__ import annotations

import pathlib
import re

import pytest

from hkv.testing.planting import Patch
from tests.mutants import provenance
from tests.mutants.catalogue import MUTANTS, OWN, PUBLISHED, SECTIONS
from tests.mutants.row import Planted
from tests.mutants.suite_judge import judge
from tests.suites import SUITES

PAGE = pathlib.Path(__file__).resolve().parent.parent.parent / "docs" / "tables" / "mutants.md"
BUGS = {row.name: row for section in PUBLISHED for row in SECTIONS[section]}
"""The published ones."""

SAMPLE = tuple(sorted(BUGS))[::14]
"""Every fourteenth of them."""


def test_every_patch_fits_and_no_edit_has_two_names():
    edits = [(found.edits, found.judge, found.arguments if found.section in OWN else ()) for found in MUTANTS.values()]
    assert len(set(edits)) == len(edits) >= 120
    for found in MUTANTS.values():
        for patch in found.edits:
            patch.code()


def test_every_mutant_says_what_it_is():
    assert sum(map(len, SECTIONS.values())) == len(MUTANTS), "two mutants have one name"
    for name, found in BUGS.items():
        assert found.upstream, name
        assert all("#" in id or "@" in id for id in found.upstream), name
        assert not found.wrong.endswith("."), name
        assert found.wrong, name
        assert found.expected, name
        assert found.judge in SUITES, name
        assert set(found.arguments) <= set(SUITES[found.judge].topics), name


def test_a_row_of_our_own_names_a_property():
    own = [found for section in OWN for found in SECTIONS[section]]
    assert all(callable(found.property()) and found.judge_name for found in own)
    assert {found.name for found in own} == set(MUTANTS) - set(BUGS)
    assert {section: len(SECTIONS[section]) >= 12 for section in OWN} == dict.fromkeys(OWN, True)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_mutant_is_caught(name):
    verdict = judge(MUTANTS[name])
    assert verdict.killed
    assert verdict.size >= 1
    assert verdict.lines


def test_a_case_shrinks_to_an_eviction_order_of_a_few_operations():
    verdict = judge(MUTANTS["taken-from-the-back"])
    assert verdict.invariant == "eviction order"
    assert verdict.size <= 3
    assert verdict.lines[0].startswith('{"oplog":2')
    assert all(line.startswith('{"op":') for line in verdict.lines[1:])
    assert verdict.size == len(verdict.lines) - 1


def test_a_change_that_breaks_nothing_survives():
    harmless = edited("reference.slots:place", "turn * geometry", "1 * turn * geometry")
    verdict = judge(harmless, seeds=3)
    assert not verdict.killed
    assert verdict.examples == 30


def edited(function: str, old: str = "a", new: str = "b") -> Planted:
    """A row of one edit, judged by the suite of slots."""
    return Planted("x", "none", (Patch(function, old, new),), "slots")


def test_the_page_says_the_count():
    assert provenance.in_words(list(BUGS.values())) in PAGE.read_text()


def test_the_page_lists_every_row():
    page = PAGE.read_text()
    assert [name for name in MUTANTS if f"| `{name}` |" not in page] == []
    assert f"{len(MUTANTS)} of {len(MUTANTS)} mutants killed" in page
    own = sum(len(SECTIONS[section]) for section in OWN if section != "properties")
    (said,) = re.findall(r"Over (\d+) one-line defects", (PAGE.parents[1] / "evidence.md").read_text())
    assert own > int(said)

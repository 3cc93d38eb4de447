"""Console blocks of documents: all of the output is compared, and each block is compared somewhere."""

from __future__ import annotations

import pathlib
import re

import pytest

from benchmarks.quoted.claim import Output
from benchmarks.quoted.console import CUT, Shown, difference, shown_in
from benchmarks.quoted.documents import CLAIMS

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BY_TESTS = {"docs/checking-your-engine.md", "docs/upstream-bugs.md"}
"""Pages whose blocks tests run; `benchmarks/claims.py` runs those of others."""


@pytest.mark.parametrize(
    ("shown", "output"),
    [
        ((), ""),
        (("one", "two"), "one\ntwo\n"),
        (("one", "two"), "one   \ntwo\n\n"),
        (("one", CUT), "one\ntwo\nthree\n"),
        ((CUT, "three"), "one\ntwo\nthree\n"),
        (("one", CUT, "four"), "one\ntwo\n\nfour\n"),
        (("a.c", CUT), "a.c\nb\n"),
    ],
)
def test_whole_output_agrees(shown: tuple[str, ...], output: str) -> None:
    assert difference(Shown("command", shown), output) is None


@pytest.mark.parametrize(
    ("shown", "output"),
    [
        ((), "one\n"),
        (("one",), "one\ntwo\n"),
        (("two",), "one\ntwo\n"),
        (("one", "three"), "one\ntwo\nthree\n"),
        (("two", "one"), "one\ntwo\n"),
        (("one", "two"), "one\n"),
        (("one", CUT), "one\n"),
        (("one", CUT, "two"), "one\ntwo\n"),
        (("a.c",), "abc\n"),
        ((" one",), "one\n"),
    ],
)
def test_shortened_reordered_and_other_output_differs(shown: tuple[str, ...], output: str) -> None:
    problem = difference(Shown("command", shown), output)
    assert problem is not None
    assert problem.startswith("$ command\n")


def test_every_console_block_is_compared() -> None:
    by_claims = {(claim.document, claim.command) for claim in CLAIMS if isinstance(claim, Output)}
    assert {document for document, _ in by_claims}.isdisjoint(BY_TESTS)
    found = {(str(page.relative_to(ROOT)), each.command) for page in PAGES for each in shown_in(page.read_text())}
    assert {each for each in found if each[0] not in BY_TESTS} == by_claims
    assert {document for document, _ in found} >= BY_TESTS


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_a_prompt_stands_in_a_console_block_only(page: pathlib.Path) -> None:
    outside = re.sub(r"^```console\n.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert re.findall(r"^ *\$ .*", outside, re.MULTILINE) == []

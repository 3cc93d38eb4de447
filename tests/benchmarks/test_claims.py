"""`benchmarks/claims.py`: what documents quote is there, what costs nothing is made again, and drift is noticed."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import claims as command
from benchmarks.quoted.claim import AnyClaim, Claim, Output, Spread, Table
from benchmarks.quoted.console import CUT, Shown, difference, shown_in
from benchmarks.quoted.documents import CLAIMS
from benchmarks.quoted.quotation import NotQuotedError, Quotation, as_exact_as
from benchmarks.quoted.source import ROOT, Setting, Source, SourceError
from benchmarks.quoted.sources import SOURCES

COUNTED = [claim for claim in CLAIMS if all(callable(SOURCES[name].makes) for name in claim.sources)]


@pytest.mark.parametrize("claim", CLAIMS, ids=[claim.title[:80] for claim in CLAIMS])
def test_every_claim_stands_in_its_document_once(claim: AnyClaim) -> None:
    start, end = claim.span((ROOT / claim.document).read_text())
    assert start < end
    assert set(claim.sources) <= set(SOURCES)


def test_every_source_is_wanted() -> None:
    assert {name for claim in CLAIMS for name in claim.sources} == set(SOURCES)


def test_what_is_only_counted_is_what_documents_say() -> None:
    run = command.Run(Setting())
    for claim in COUNTED:
        run.claim(claim, (ROOT / claim.document).read_text())
    assert len(run.drifts) >= 8
    assert {claim.title: problems for claim, problems in run.drifts.items() if problems} == {}


def test_every_figure_of_what_has_been_shown_is_claimed() -> None:
    """Numbers of versions and of planted bugs, which their own page has, aside."""
    page = (ROOT / "docs" / "evidence.md").read_text()
    start, end = page.index("## What has been shown"), page.index("## Speed")
    spans = [claim.span(page) for claim in CLAIMS if claim.document == "docs/evidence.md"]
    left_out = [
        match.span()
        for match in re.finditer(r"`[^`]*`|\d+\.\d+\.\d+|vLLM \d\.\d+|\| Published[^\n]*|an H200|-h200", page)
    ]
    unclaimed = [
        match[0]
        for match in re.finditer(r"\d[\d,.]*\d|\d", page[start:end])
        if not any(a <= start + match.start() < b for a, b in spans + left_out)
    ]
    assert unclaimed == []


# Quotations.


@pytest.mark.parametrize("page", ["All caches", "All 1 caches, All 2 caches", "All some caches"])
def test_a_sentence_that_is_not_there_once_is_named(page: str) -> None:
    with pytest.raises(NotQuotedError, match="not once"):
        Quotation("All {count} caches").figures(page)


@pytest.mark.parametrize(
    ("written", "figure", "now"),
    [
        ("1,809,802", 1810686, "1,810,686"),
        ("0.016", 0.0031, "0.003"),
        ("3", 2.87, "3"),
        ("Seven", 8, "Eight"),
        ("seven", 30, "30"),
        ("4096", 8192, "8192"),
        ("96", 1200, "1,200"),
        ("33.14", 33.138457, "33.14"),
    ],
)
def test_figures_are_written_as_they_were(written: str, figure: float, now: str) -> None:
    assert as_exact_as(written, figure) == now


# Claims, on a page of their own.

PAGE = "Found 5 of 1,000 in\nten tries, at 40 to 60 times the speed.\n\n<!-- rows -->\n| a | 1 |\n<!-- end -->\n"
EXACT = Claim("page", "Found {found} of {all} in {tries} tries", ("counts",), lambda made: made)
RATIO = Claim(
    "page", "at {least} to {most} times", ("speed",), lambda made: made, {"ratio": Spread("least", "most", 2)}
)
ROWS = Table("page", "rows", ("rows",), lambda made: made["rows"])
COUNTS = {"found": 5, "all": "1,000", "tries": 10}


@pytest.mark.parametrize(("name", "figure"), [("found", 6), ("all", 999), ("tries", 11)])
def test_one_count_that_drifted_is_named_and_written(name: str, figure: int) -> None:
    made: list[Mapping[str, Any]] = [{**COUNTS, name: figure}]
    (problem,) = EXACT.drift(PAGE, made)
    assert problem.startswith(f"{name}: published ")
    assert EXACT.drift(EXACT.rewritten(PAGE, made), made) == []


def test_rows_that_drifted_are_named_and_written() -> None:
    made: list[Mapping[str, Any]] = [{"rows": ["| a | 2 |"]}]
    assert ROWS.drift(PAGE, made) == ["published, not made: | a | 1 |", "made, not published: | a | 2 |"]
    assert ROWS.drift(ROWS.rewritten(PAGE, made), made) == []


@pytest.mark.parametrize(("ratio", "passes"), [(19, False), (21, True), (50, True), (119, True), (121, False)])
def test_ratios_are_compared_with_the_published_spread(ratio: float, passes: bool) -> None:
    assert (RATIO.drift(PAGE, [{"ratio": ratio}]) == []) == passes
    assert RATIO.rewritten(PAGE, [{"ratio": ratio}]) == PAGE


# Sources, and the command.


def test_a_command_that_fails_or_says_something_else_is_an_error() -> None:
    with pytest.raises(SourceError, match="exit status 3"):
        Source("s", "python -c 'raise SystemExit(3)'").figures(Setting())
    with pytest.raises(SourceError, match="nothing in the output is a count"):
        Source("s", "python -c 'print(1)'", {"count": r"count (\d)"}).figures(Setting())
    with pytest.raises(SourceError, match="no JSON"):
        Source("s", "python -c 'print(\"x\")'").figures(Setting())


def test_a_command_that_writes_files_runs_apart() -> None:
    where = Source("s", "python -c 'import os; print(os.getcwd())'", {"folder": "(.+)"}, apart=True).figures(Setting())
    assert not pathlib.Path(where["folder"]).exists()
    assert ROOT not in [pathlib.Path(where["folder"]), *pathlib.Path(where["folder"]).parents]


def made_up(monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path, found: int) -> pathlib.Path:
    """The command on a page of one claim that is made, and one that needs an installed vLLM."""
    page = folder / "page"
    page.write_text(PAGE)
    sources = {
        "counts": Source("counts", lambda: {**COUNTS, "found": found}),
        "speed": Source("speed", "VLLM/bin/python x"),
    }
    monkeypatch.setattr(command, "ROOT", folder)
    monkeypatch.setattr(command, "CLAIMS", (EXACT, RATIO))
    monkeypatch.setattr(command, "SOURCES", sources)
    return page


def test_the_command_says_what_ran_and_what_did_not(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    made_up(monkeypatch, tmp_path, 5)
    done = CliRunner().invoke(command.main, [])
    assert done.exit_code == 0, done.output
    assert "not made: 1 claims, which need --vllm-python" in done.output
    assert "1 claims made again, 0 of them drifted; 1 not made, of 2" in done.output


def test_the_command_fails_on_drift_and_writes_it_when_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    page = made_up(monkeypatch, tmp_path, 6)
    done = CliRunner().invoke(command.main, ["--only", "counts"])
    assert done.exit_code == 1
    assert "found: published 5, made 6" in done.output
    assert page.read_text() == PAGE
    assert CliRunner().invoke(command.main, ["--write"]).exit_code == 0
    assert page.read_text() == PAGE.replace("Found 5", "Found 6")


def test_an_unknown_name_is_refused() -> None:
    done = CliRunner().invoke(command.main, ["--only", "no-such-document"])
    assert done.exit_code == 2
    assert "no-such-document" in done.output


# Console blocks of documents: all of the output is compared, and each block is compared somewhere.


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BY_TESTS = {"docs/checking-your-engine.md", "docs/my-engine.md", "docs/not-modelled.md"}
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

"""Every published invariant has a check or a reason, every check stands for one, and the page says so."""

from __future__ import annotations

import pathlib

from tests.suites import SUITES
from tests.suites.published import ELSEWHERE, PUBLISHED, main, page, rows

PAGE = pathlib.Path(__file__).resolve().parent.parent.parent / "docs" / "invariants.md"


def test_every_published_invariant_has_a_check_or_a_reason():
    checked = {id for row in rows() for id in row.promises}
    assert checked | set(ELSEWHERE) == set(PUBLISHED)
    assert not checked & set(ELSEWHERE)
    assert list(PUBLISHED) == [f"B-I{number}" for number in range(1, 39)]


def test_every_check_is_named_once_and_says_what_it_stands_for():
    names = [row.name for row in rows()]
    assert len(set(names)) == len(names)
    for row in rows():
        assert row.promises, row.name
        assert row.promise.endswith("."), row.name
        assert len(row.promise) > 30, row.name


def test_every_suite_of_cases_is_listed():
    listed = {row.where for row in rows()}
    for name, suite in SUITES.items():
        if hasattr(suite, "checks"):
            assert f"suite `{name}`" in listed


def test_the_page_is_current(tmp_path):
    main([str(tmp_path / "invariants.md")])
    assert (tmp_path / "invariants.md").read_text() == page() == PAGE.read_text()

"""Suites pass on code that is right."""

from __future__ import annotations

import pathlib

import pytest

from hkv.contract.traffic import RandomChoices
from hkv.testing.planting import Patch, applied
from tests.suites import SUITES
from tests.suites.published import ELSEWHERE, PUBLISHED, main, page, rows
from tests.suites.slots import draw_addressing
from tests.suites.suite import Recorded

EXAMPLES = {"traffic": 24, "comeback": 24, "plans": 12, "pages": 12, "slots": 150}
"""Examples that each suite runs on the code as it is; others run more."""


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_passes_on_code_that_is_right(name):
    for seed in range(EXAMPLES.get(name, 60)):
        assert SUITES[name].run(seed) is None, seed


GROWN = 1000537
"""A plan with states whose grid grows next to a hidden state that does not fit their page."""


def test_a_grid_that_grows_for_a_hidden_state_is_right_and_one_that_grows_further_is_not():
    target = "hkv.dialects.vllm.planning.grouping:add_hidden_states"
    assert SUITES["plans"].run(GROWN) is None
    with applied(Patch(target, "scale = -(-largest // page)", "scale = -(-largest // page) + 1")):
        assert (SUITES["plans"].run(GROWN) or pytest.fail("not noticed")).invariant == "pages"


def test_recorded_decisions_make_the_same_case_again():
    first = Recorded(RandomChoices(7))
    case = draw_addressing(first)
    assert draw_addressing(Recorded(None, first.made)) == case


PAGE = pathlib.Path(__file__).resolve().parent.parent.parent / "docs" / "tables" / "invariants.md"


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


def test_the_page_is_current(tmp_path):
    main([str(tmp_path / "invariants.md")])
    assert (tmp_path / "invariants.md").read_text() == page() == PAGE.read_text()

"""Suites pass on code that is right."""

from __future__ import annotations

import pytest

from hkv.contract.traffic import RandomChoices
from hkv.testing.planting import Patch, applied
from tests.suites import SUITES
from tests.suites.slots import draw_addressing
from tests.suites.suite import Recorded

EXAMPLES = {"traffic": 24, "comeback": 24, "plans": 12, "pages": 12, "slots": 150}
"""Examples that each suite runs on the code as it is; others run more."""


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_passes_on_code_that_is_right(name):
    for seed in range(EXAMPLES.get(name, 60)):
        assert SUITES[name].run(seed) is None, seed


GROWN = 1000537
"""A plan with states whose grid grows beside a hidden state that does not fit their page."""


def test_a_grid_that_grows_for_a_hidden_state_is_right_and_one_that_grows_further_is_not():
    target = "hkv.dialects.vllm.planning.grouping:add_hidden_states"
    assert SUITES["plans"].run(GROWN) is None
    with applied(Patch(target, "scale = -(-largest // page)", "scale = -(-largest // page) + 1")):
        assert (SUITES["plans"].run(GROWN) or pytest.fail("not noticed")).invariant == "pages"


def test_recorded_decisions_make_the_same_case_again():
    first = Recorded(RandomChoices(7))
    case = draw_addressing(first)
    assert draw_addressing(Recorded(None, first.made)) == case

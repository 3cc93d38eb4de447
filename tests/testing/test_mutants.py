"""Patches fit once or not at all; suites pass on code that is right; a sample of the published bugs is caught."""

from __future__ import annotations

import pathlib

import pytest

from hkv.errors import OperationError
from hkv.testing.mutants import MUTANTS, SECTIONS, Patch, applied, judge, provenance
from hkv.testing.mutants.mutant import mutant
from hkv.testing.suites import SUITES
from hkv.testing.suites.slots import draw_addressing
from hkv.testing.suites.suite import Recorded
from reference import slots
from reference.state.free_queue import FreeQueue

PAGE = pathlib.Path(__file__).resolve().parent.parent.parent / "docs" / "mutants.md"
POP = "reference.state.free_queue:FreeQueue.pop"
EXAMPLES = {"traffic": 24, "comeback": 24, "plans": 12, "pages": 12}
"""Examples that each suite runs on the code as it is; others run more."""

SAMPLE = tuple(sorted(MUTANTS))[::14]
"""Every fourteenth mutant."""


def test_a_patch_runs_and_is_taken_back():
    queue = FreeQueue([1, 2, 3])
    with applied(Patch(POP, "last=False", "last=True")):
        assert queue.pop() == 3
    assert queue.pop() == 1


def test_a_patch_reaches_jitted_functions():
    from hkv.cache import step

    patch = Patch("hkv.cache.step:find", "jnp.where(same, age, 0)", "jnp.where(same, 1, 0)")
    assert patch.function() is step.find.__wrapped__
    patch.code()


def test_a_patch_is_taken_back_when_the_block_fails():
    with pytest.raises(KeyError), applied(Patch(POP, "last=False", "last=True")):
        raise KeyError
    assert FreeQueue([1, 2]).pop() == 1


def test_a_patch_reaches_properties_and_methods_that_call_super():
    patch = Patch("reference.dialects.vllm.kinds.mamba:MambaKind.register", "if self.aligned:", "if not self.aligned:")
    assert patch.code().co_freevars == ("__class__",)
    assert Patch("hkv.layout.block_layout:Layout.states_per_block", "*", "+").function().__name__ == "states_per_block"


def test_two_edits_of_one_function_are_applied_together():
    target = "reference.slots:place"
    edits = (Patch(target, "geometry.ranks)\n    deal", "geometry.ranks)\n    deal"),)
    with pytest.raises(OperationError, match="other than the old"), applied(*edits):
        pass
    both = (
        Patch(target, "return rank, column,", "return rank + 100, column,"),
        Patch(target, "+ within", "+ within + 7"),
    )
    before = slots.place(slots.Geometry(4), 5)
    with applied(*both):
        rank, column, offset = slots.place(slots.Geometry(4), 5)
    assert (rank - 100, column, offset - 7) == before


@pytest.mark.parametrize(
    ("target", "old", "new", "named"),
    [
        (POP, "self", "it", "once, not"),
        (POP, "last=Maybe", "last=True", "once, not 0 times"),
        (POP, "return ", "return return ", "Python"),
        ("reference.state.free_queue:FreeQueue.push", "a", "b", "something that exists"),
        ("reference.state.no_such_module:f", "a", "b", "something that exists"),
        ("reference.state.pool:NULL", "0", "1", "a plain function"),
    ],
)
def test_an_ambiguous_or_impossible_patch_is_refused(target, old, new, named):
    original = FreeQueue.pop.__code__
    with pytest.raises(OperationError, match=named), applied(Patch(target, old, new)):
        raise AssertionError("the block must not run")
    assert FreeQueue.pop.__code__ is original


def test_every_patch_fits_and_no_edit_has_two_names():
    edits = [tuple((patch.target, patch.old, patch.new) for patch in found.patches) for found in MUTANTS.values()]
    assert len(set(edits)) == len(edits) >= 120
    for found in MUTANTS.values():
        for patch in found.patches:
            patch.code()


def test_every_mutant_says_what_it_is():
    assert sum(map(len, SECTIONS.values())) == len(MUTANTS), "two mutants have one name"
    for name, found in MUTANTS.items():
        assert found.upstream, name
        assert all("#" in id or "@" in id for id in found.upstream), name
        assert not found.wrong.endswith("."), name
        assert found.wrong, name
        assert found.expected, name
        assert found.suite in SUITES, name
        assert set(found.topics) <= set(SUITES[found.suite].topics), name


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_passes_on_code_that_is_right(name):
    for seed in range(EXAMPLES.get(name, 60)):
        assert SUITES[name].run(seed) is None, seed


GROWN = 1000094
"""A plan with states whose grid grows beside a hidden state that does not fit their page."""


def test_a_grid_that_grows_for_a_hidden_state_is_right_and_one_that_grows_further_is_not():
    target = "hkv.dialects.vllm.planning.hidden:add_hidden_states"
    assert SUITES["plans"].run(GROWN) is None
    with applied(Patch(target, "scale = -(-largest // page)", "scale = -(-largest // page) + 1")):
        assert (SUITES["plans"].run(GROWN) or pytest.fail("not noticed")).invariant == "pages"


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
    harmless = mutant(
        "harmless",
        "none#0",
        "nothing",
        "none",
        "slots",
        "reference.slots:place",
        "turn * geometry",
        "1 * turn * geometry",
    )
    verdict = judge(harmless, seeds=3)
    assert not verdict.killed
    assert verdict.examples == 30


def test_recorded_decisions_make_the_same_case_again():
    from hkv.testing.choices import RandomChoices

    first = Recorded(RandomChoices(7))
    case = draw_addressing(first)
    assert draw_addressing(Recorded(None, first.made)) == case


def test_the_count_tells_reports_from_names_of_our_own():
    assert [provenance.is_public(id) for id in ("vllm#33775", "some-lab/vllm#5", "rtp-llm@04e47d7b1")] == [True] * 3
    assert [provenance.is_public(id) for id in ("vllm@partial-tail", "rtp-llm@last-key", "dsv4@align-576")] == [
        False
    ] * 3
    found = provenance.count(list(MUTANTS.values()))
    assert sum(found.targets.values()) == found.mutants == len(MUTANTS)
    assert found.public + found.slugs == len({id for each in MUTANTS.values() for id in each.upstream})
    assert found.targets["compiled"] == found.targets["kernels"] == 0, "then the page must not say that none edits it"


def test_a_target_is_where_the_code_lies():
    def edited(target):
        return provenance.target_of(mutant("x", "vllm#1", "x", "x", "slots", target, "a", "b"))

    assert edited("hkv.dialects.vllm.rules.admit:fits") == "compiled"
    assert edited("hkv.dialects.vllm.config:VllmConfig") == "host"
    assert edited("hkv.state.free_queue:take") == "state"
    assert edited("hkv.cache.arrivals:arrive") == "step"
    assert edited("hkv.paged.operations:write") == "paged"
    assert edited("pallas_kernels.gather.mosaic:ring") == "kernels"
    assert edited("reference.step:Rows.step") == "reference"


def test_the_page_says_the_count():
    assert provenance.in_words(list(MUTANTS.values())) in PAGE.read_text()

"""Each property finds a defect of one line: planted in the reference, found under traffic that is fine without it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hkv.contract.invariant import InvariantError
from hkv.dialects.vllm.invariants import INVARIANTS
from hkv.dialects.vllm.traffic.headers import FEATURES
from hkv.testing.planting import Patch, applied
from tests.mutants.catalogue import SECTIONS
from tests.properties.invariant_traffic import SEEDS, play

DEFECTS = SECTIONS["properties"]
PROMPT_END = Patch("reference.dialects.vllm.coordinator:longest_hit", "request.num_tokens - 1", "request.num_tokens")


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_planted_defect_is_found(defect):
    with applied(*defect.edits), pytest.raises(InvariantError) as found:
        defect.property()()
    assert found.value.name == defect.arguments[0]


def test_the_same_traffic_breaks_nothing_without_a_defect():
    for number in range(SEEDS):
        play(number, FEATURES, INVARIANTS.values())


def test_a_hit_that_leaves_no_token_to_compute_is_no_matter_of_drafts():
    with applied(PROMPT_END):
        named = {first_named(("core", "eagle"), number) for number in range(SEEDS // 2)}
    assert "consistency" in named
    assert "draft margin" not in named


def first_named(features: Sequence[str], number: int) -> str | None:
    """Of the invariants about hits, the one that breaks first."""
    try:
        play(
            number, features, [INVARIANTS[name] for name in ("soundness", "maximality", "draft margin", "consistency")]
        )
    except InvariantError as error:
        return error.name
    except Exception:
        return "the engine fails"
    return None


def test_every_invariant_has_a_defect_that_it_finds():
    assert {defect.arguments[0] for defect in DEFECTS} == set(INVARIANTS)

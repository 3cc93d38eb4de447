"""The compiled cache beside the reference, operation by operation, under random traffic."""

from __future__ import annotations

from types import FunctionType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv import cache
from hkv.dialects.vllm import allocate, finders
from hkv.oracle.check import describe
from hkv.oracle.compare import Mismatch, compare
from hkv.oracle.engine import apply
from hkv.oracle.engines.jax import JaxEngine
from hkv.oracle.engines.numpy import NumpyEngine
from hkv.oracle.oplog import Answer, Header, Operation
from hkv.state import free_queue, key_table
from hkv.testing.choices import Choices, RandomChoices
from hkv.testing.strategies import HypothesisChoices
from hkv.testing.traffic import draw_header, drive
from tests.properties.planting import planted

FEATURES = ("core", "eagle", "context_parallel", "external")
STEPS = 10


class DifferenceError(AssertionError):
    """The two engines answered differently."""


def lockstep(header: Header, choices: Choices) -> None:
    compiled, reference = JaxEngine(header), NumpyEngine(header)

    def perform(operation: Operation) -> Answer:
        want, got = apply(reference, operation), apply(compiled, operation)
        mismatch = compare(want, got, header.oplog)
        if isinstance(mismatch, Mismatch):
            raise DifferenceError(
                f"{describe(operation)}: {mismatch.field}: {mismatch.want} but {mismatch.got}\n{header}"
            )
        return want

    drive(header, choices, perform, STEPS)
    assert compiled.evictions == reference.evictions
    assert compiled.num_free() == reference.num_free()


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("version", [1, 2])
def test_random_traffic(feature: str, version: int) -> None:
    for seed in range(15):
        choices = RandomChoices(1000 * version + seed)
        lockstep(draw_header(choices, feature, version), choices)


@settings(max_examples=25)
@given(st.data(), st.sampled_from(FEATURES))
def test_shrinking_traffic(data: st.DataObject, feature: str) -> None:
    choices = HypothesisChoices(data)
    lockstep(draw_header(choices, feature, 2), choices)


DEFECTS = [
    (finders.backward, "run + 1, 0)", "run + 1, run)"),
    (allocate.adopt_hit, "jnp.maximum(skip, found))", "found)"),
    (free_queue.release, "w.tail + (left - 1)", "w.tail + (count - left)"),
    (key_table.insert, "w.link(last, part, 0)", "w.link(first, part, 0)"),
]  # fmt: skip


def many_seeds() -> None:
    for seed in range(120):
        choices = RandomChoices(seed)
        lockstep(draw_header(choices, FEATURES[seed % 4]), choices)


@pytest.fixture
def _fresh_programs():
    cache.forget_programs()
    yield
    cache.forget_programs()


@pytest.mark.usefixtures("_fresh_programs")
@pytest.mark.parametrize(("function", "text", "defect"), DEFECTS, ids=[f"{f.__name__}" for f, *_ in DEFECTS])
def test_planted_defects_are_found(function: FunctionType, text: str, defect: str) -> None:
    with planted(function, text, defect), pytest.raises(DifferenceError):
        many_seeds()

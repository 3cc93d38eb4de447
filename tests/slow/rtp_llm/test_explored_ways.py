"""The compiled cache along ways that exploring finds: the same answers, operation by operation, and the same state."""

from __future__ import annotations

import random

import pytest

from hkv.contract.answer import compare
from hkv.dialects.rtp_llm.engines.jax import RtpJaxEngine
from hkv.dialects.rtp_llm.engines.numpy import RtpNumpyEngine
from hkv.dialects.rtp_llm.log import structs
from tests.rtp_llm.explored import SPACES, explored, world

WAYS = 40


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("name", SPACES)
def test_the_compiled_cache_answers_alike_along_explored_ways(name: str, tree: bool) -> None:
    """A random sample, and the longest ways."""
    search = explored(name, tree=tree)
    states = search.report.states
    chosen = {*random.Random(0).sample(range(states), WAYS // 2), *range(states - WAYS // 2, states)}
    header = world(name, tree=tree).header
    for state in sorted(chosen):
        compiled, plain = RtpJaxEngine(header), RtpNumpyEngine(header)
        for operation in (*search.way(state), structs.StateOp()):
            want, got = plain.perform(operation), compiled.perform(operation)
            assert compare(want, got) is None, (search.way(state), operation)

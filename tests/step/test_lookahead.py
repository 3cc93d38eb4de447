"""Keys that cover tokens after their blocks: whole steps are what the sequential rules say with such keys."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.cache.state import require_expressible
from hkv.contract.traffic import RandomChoices
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.kinds import of_kind
from hkv.errors import ConfigError
from hkv.model.topology import Topology
from hkv.spec import spec_from_log
from tests.reference.build import config as build
from tests.step.sample import assert_same, configs
from tests.step.test_arrivals import arrive, plain, turnover, two_texts
from tests.step.test_step import NO_ROOM, OK, Pair, T, drawn_tokens, padded

AHEAD = 5
"""More than most hash blocks, and no multiple of the four tokens that are mixed at once."""


@st.composite
def looking_ahead(draw):
    config = draw(configs(least_blocks=12))
    return dataclasses.replace(config, hash_lookahead=AHEAD)


@settings(max_examples=50)
@given(config=looking_ahead().filter(plain), data=st.data())
def test_steps_and_arrivals_are_the_sequential_operations_in_order(config, data):
    pair = Pair(config)
    longest = min(40 - T, min(config.block_sizes) * 20 - T)
    texts = two_texts(data, longest)
    for _ in range(data.draw(st.integers(3, 8))):
        new, _ = turnover(pair, data, texts, st.integers(1, longest))
        arrive(pair, new)
        assert_same(pair.rows, pair.state)
        for _ in range(data.draw(st.integers(1, 4))):
            tokens = drawn_tokens(data, pair)
            for row, prompt in new.items():
                tokens[row] = prompt[pair.rows.request(row).num_computed :][:T] or tokens[row]
            status = pair.step(tokens)
            new = {row: prompt for row, prompt in new.items() if status[row] in (OK, NO_ROOM)}


def test_what_would_be_lost_is_refused():
    with pytest.raises(ConfigError, match="hash_lookahead = 1: expected 0 where hits end inside blocks"):
        padded(build("full:2,mamba:4", num_blocks=8, hash_block_size=2, partial_hits=True, hash_lookahead=1))
    with pytest.raises(ConfigError, match="hash_lookahead = 65: expected at most 64 tokens"):
        padded(build("full:2", num_blocks=8, hash_lookahead=65))


@pytest.mark.parametrize("kind", ["cross_attention", "replayed_window"])
def test_kinds_that_steps_do_not_have_are_refused(kind):
    spec = spec_from_log(of_kind(kind).draw(RandomChoices(0), 2, "core", 1))
    with pytest.raises(ConfigError, match=rf"groups\[0\]\.kind = '{kind}'"):
        require_expressible(_alone(spec))


def _alone(spec):
    sizes = {"hash_block_size": spec.block_size, "scheduler_block_size": spec.block_size}
    return VllmConfig(topology=Topology.of_specs([spec]), num_blocks=8, caching=False, **sizes)

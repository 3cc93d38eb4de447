"""Keys that cover tokens after their blocks: arrivals are the sequential rules, in programs of their own."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.step.sample import configs
from tests.step.test_arrivals import drive, plain
from tests.step.test_step import Pair, T

AHEAD = 5
"""More than most hash blocks, and no multiple of the four tokens that are mixed at once."""


@st.composite
def looking_ahead(draw):
    config = draw(configs(least_blocks=12))
    return dataclasses.replace(config, hash_lookahead=AHEAD)


@settings(max_examples=50)
@given(config=looking_ahead().filter(plain), data=st.data())
def test_arrivals_with_keys_ahead_are_lookups_and_adoptions_in_order(config, data):
    drive(Pair(config), data, min(40 - T, min(config.block_sizes) * 20 - T))

"""States inside chunks where keys cover tokens after their blocks: whole steps are what the sequential rules say."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.build import config as build
from tests.slow.step.test_checkpoints import configs, drive, states
from tests.step.sample import assert_same
from tests.step.test_arrivals import arrive
from tests.step.test_step import OK, Pair

AHEAD = 3


@settings(max_examples=60)
@given(config=configs(), data=st.data())
def test_steps_are_the_sequential_operations_in_order(config, data):
    drive(dataclasses.replace(config, hash_lookahead=AHEAD), data)


def test_a_state_that_nobody_wants_is_not_taken_for_the_one_at_the_end_of_its_block():
    """A state every 4 tokens: the one after 6 stands, without a key, where one after 8 would, and is in use so long."""
    pair = Pair(build([states(2)], num_blocks=60, retention_interval=4, hash_lookahead=AHEAD))
    prompt = list(range(1, 25))
    arrive(pair, {0: prompt})
    for first, last in ((0, 4), (4, 9)):
        assert pair.step([prompt[first:last], [], [], [], []])[0] == OK
    ((_, _, tokens, block),) = pair.rows.checkpoints
    assert (tokens, pair.rows.blocks(0, 0).index(block)) == (2, 3)
    for first, last in ((9, 10), (10, 12)):
        assert pair.step([prompt[first:last], [], [], [], []], in_flight=[5, 0, 0, 0, 0])[0] == OK
    assert pair.rows.blocks(0, 0)[3] == block
    assert not pair.rows.manager.pool.keys_of(block)
    assert_same(pair.rows, pair.state)


def test_columns_before_a_state_are_not_looked_at_again_when_their_keys_are_known():
    """Keys come three tokens late: by then a state inside a later chunk stands, and what is before it was looked at."""
    pair = Pair(build([states(1)], num_blocks=60, eagle=(0,), hash_lookahead=AHEAD))
    prompt = list(range(1, 10))
    arrive(pair, {0: prompt})
    for first, last in ((0, 1), (1, 3), (3, 5), (5, 7), (7, 9)):
        in_flight = [3 * (first >= 3), 0, 0, 0, 0]
        assert pair.step([prompt[first:last], [], [], [], []], in_flight=in_flight)[0] == OK
        assert_same(pair.rows, pair.state)

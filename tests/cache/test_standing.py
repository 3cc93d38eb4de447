"""States inside chunks that still stand when more tokens have keys: their blocks get no other key."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hkv.dialects.vllm.rules import export
from hkv.dialects.vllm.rules.export import WINDOW
from hkv.spec import FullAttention, Mamba
from tests.cache.build import config
from tests.cache.pair import Pair

DEFECT = "checkpoint-under-later-key"
GROUPS = (
    FullAttention(block_size=8),
    Mamba(block_size=4, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=4),
)


def begun(**changes) -> Pair:
    """A request whose first 13 tokens leave the state after 8 in the column of the one after 12."""
    pair = Pair(config(*GROUPS, **changes))
    pair.request("a", 24, range(6))
    assert pair.allocate("a", 13)
    assert covered(pair) == [0, 0, 8, 0]
    pair.advance("a", 13)
    return pair


def covered(pair: Pair) -> list[int]:
    """Tokens that each block of the recurrent row is known by."""
    manager = pair.reference.manager
    return [manager.pool.covered[block] for block in manager.cache.kinds[1].row("a").blocks]


@pytest.mark.parametrize(("bug", "known"), [("contract", 8), (DEFECT, 12)])
def test_a_state_that_stands_is_not_taken_for_the_one_at_the_end_of_its_block(bug: str, known: int):
    pair = begun(bugs=frozenset({bug} - {"contract"}))
    assert pair.allocate("a", 5, in_flight=13)
    assert covered(pair)[2] == known


def test_a_refused_chunk_changes_nothing_of_that():
    pair = begun()
    assert not pair.allocate("a", 5, in_flight=13, reserved=40)
    assert pair.allocate("a", 5, in_flight=13)
    assert covered(pair)[2] == 8


def test_a_request_that_comes_again_registers_what_it_computes_there():
    for chunks in ((13,), (13, 1)):
        pair = begun()
        for new in chunks[1:]:
            assert pair.allocate("a", new, in_flight=13)
        pair.free("a")
        for new, known in ((12, 0), (4, 12)):
            assert pair.allocate("a", new, in_flight=12 if new == 4 else 0)
            assert covered(pair)[2] == known
            pair.advance("a", new)


@given(
    st.integers(0, 1000),
    st.sets(st.integers(0, WINDOW - 1)),
    st.integers(0, 3 * WINDOW),
)
def test_entries_that_were_passed_stand_no_longer(first: int, places: set[int], count: int):
    entries = {first + place for place in places}
    word = jnp.int32(
        sum(1 << entry % WINDOW for entry in entries) - (sum(entry % WINDOW == 31 for entry in entries) << 32)
    )
    left = export.passed(word, jnp.int32(first), jnp.int32(first + count))
    window = jnp.arange(first, first + WINDOW)
    assert set(window[export.stands(word, window)].tolist()) == entries
    assert set(window[export.stands(left, window)].tolist()) == {entry for entry in entries if entry >= first + count}

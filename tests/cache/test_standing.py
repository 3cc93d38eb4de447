"""States inside chunks that still stand when more tokens have keys: their blocks get no other key."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hkv.dialects.vllm.rules import export
from hkv.dialects.vllm.rules.export import WINDOW
from hkv.spec import FullAttention, Mamba
from tests.cache.build import config
from tests.cache.pair import Pair

DEFECT, BEGUN = "checkpoint-under-later-key", "begun-state-under-later-key"
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


def resumed(**changes) -> Pair:
    """A hit on the state after 4 tokens, inside a block of 8, and one chunk to the end: 25 tokens, which exports."""
    states = Mamba(block_size=8, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=4)
    pair = Pair(config(FullAttention(block_size=8), states, partial_hits=True, **changes))
    pair.request("b", 5, range(1))
    assert pair.allocate("b", 4)
    pair.step()
    pair.request("a", 25, range(6))
    assert pair.lookup("a") == 4
    return pair


@pytest.mark.parametrize(("bug", "known"), [("contract", 0), (BEGUN, 8)])
def test_a_state_that_a_chunk_begins_from_is_not_taken_for_the_one_at_the_end_of_its_block(bug: str, known: int):
    pair = resumed(bugs=frozenset({bug} - {"contract"}))
    assert pair.allocate("a", 21, hit=4)
    assert covered(pair) == [known, 0, 24, 0]


def test_nor_is_it_when_its_keys_come_later():
    for chunk, known in ((21, [0, 0, 24, 0]), (4, [8])):
        pair = resumed()
        assert pair.allocate("a", chunk, hit=4, external=0, delay=True)
        pair.advance("a", 4 + chunk)
        pair.commit("a", 4 + chunk)
        assert covered(pair) == known


def test_nor_when_they_come_with_the_next_chunk():
    pair = resumed()
    assert pair.allocate("a", 17, hit=4, delay=True)
    pair.advance("a", 21)
    assert pair.allocate("a", 4, in_flight=21)
    assert covered(pair)[0] == 0


@jax.jit
def standing(word: jax.Array, first: jax.Array, seen: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Entries, of 64, that stand: from `first` on; from `seen` on, once those before are; and with one entry more."""
    left = export.passed(word, first, seen)
    more = export.with_entry(left, seen, first + WINDOW, jnp.bool_(True))
    places = jnp.arange(2 * WINDOW)
    after = seen + places
    return (
        export.stands(word, first, first + places),
        export.stands(left, seen, after),
        export.stands(more, seen, after),
    )


@given(st.integers(0, 1000), st.integers(0, (1 << WINDOW) - 1), st.integers(0, WINDOW + 8))
def test_entries_that_were_passed_stand_no_longer(first: int, places: int, count: int):
    entries = {first + place for place in range(WINDOW) if places >> place & 1}
    word = sum(1 << entry % WINDOW for entry in entries) - (sum(entry % WINDOW == 31 for entry in entries) << 32)
    seen = first + count
    before, left, more = standing(*np.int32([word, first, seen]))
    window, after = np.arange(first, first + 2 * WINDOW), np.arange(seen, seen + 2 * WINDOW)
    assert set(window[before].tolist()) == entries
    assert set(after[left].tolist()) == {entry for entry in entries if entry >= seen}
    near = {first + WINDOW} if count in range(1, WINDOW + 1) else set()
    assert set(after[more].tolist()) == {*near, *(each for each in entries if each >= seen)}


def test_a_state_at_the_end_of_its_column_keeps_the_key_that_it_has():
    """Under a prefill look-ahead of three, the state after 8 tokens has its key before its column is looked at."""
    states = Mamba(block_size=4, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=4)
    pair = Pair(config(states, prefill_lookahead=3))
    pair.request("a", 16, range(4))
    assert pair.allocate("a", 9)
    pair.advance("a", 9)
    assert pair.allocate("a", 7, in_flight=9)

"""RTP-LLM's conformance vectors for cache keys, and the key list of a sequence that grows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hkv.errors import OperationError
from hkv.keys.rolling import MIX, RollingKeys, first_keys, next_keys, roll

MASK = (1 << 64) - 1
TOKENS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40)


@pytest.mark.parametrize(
    ("token", "key"), [(1, -7046029254386353130), (0, -7046029254386353131), (-1, -7046029254386353132)]
)
def test_one_token(token: int, key: int) -> None:
    assert first_keys([token], 4).keys == (key,)


def logical(tokens: list[int]) -> int:
    """Hash that results when it is shifted as if it had no sign."""
    value = 0
    for token in tokens:
        value ^= ((token & MASK) + MIX + (value << 12) + (value >> 32)) & MASK
    return value - (1 << 64) if value >> 63 else value


def test_the_shift_is_arithmetic() -> None:
    assert logical([1, 2, 3, 4]) == 527151483457094799
    assert roll([1, 2, 3, 4]) != 527151483457094799


@given(tokens=TOKENS, block=st.integers(1, 9))
def test_keys_are_read_off_one_hash(tokens: list[int], block: int) -> None:
    keys = first_keys(tokens, block)
    assert keys.keys == tuple(roll(tokens[: (i + 1) * block]) for i in range(-(-len(tokens) // block)))
    assert keys.aligned == (len(tokens) % block == 0)
    assert all(-(2**63) <= key < 2**63 for key in keys.keys)


@given(tokens=TOKENS, more=TOKENS, block=st.integers(1, 9))
def test_keys_of_a_longer_sequence_are_those_of_its_whole_blocks(
    tokens: list[int], more: list[int], block: int
) -> None:
    whole = tokens + more
    grown = next_keys(first_keys(tokens, block), whole, block)
    assert grown == RollingKeys(first_keys(whole, block).keys[: len(whole) // block], True)


def test_a_partial_key_is_dropped_once() -> None:
    keys = first_keys([1, 2, 3, 4, 5], 4)
    assert keys.without_partial().keys == keys.keys[:1]
    assert keys.without_partial().without_partial() == keys.without_partial()


def test_impossible_arguments() -> None:
    with pytest.raises(OperationError, match="int32"):
        roll([2**31])
    with pytest.raises(OperationError, match="block_size"):
        first_keys([1], 0)
    with pytest.raises(OperationError, match="at least the 8 tokens"):
        next_keys(first_keys(list(range(8)), 4), [1], 4)

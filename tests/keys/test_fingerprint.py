"""Prefix keys computed on the device, beside their twin, and RTP-LLM's rolling ones on the host."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.errors import OperationError
from hkv.keys import fingerprint
from hkv.keys.rolling import MIX, RollingKeys, first_keys, next_keys, roll
from reference.keys import fingerprint as twin

keys = jax.jit(fingerprint.keys)
KNOWN = ["0x6ee3c260", "0xf13368ae", "0x717aff97", "0x71185fb2"]
ROOT = np.array(fingerprint.ROOT, np.uint32)


@settings(max_examples=40)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=10, max_size=10), st.sampled_from([1, 2, 5, 10]))
def test_both_forms_agree(tokens: list[int], size: int) -> None:
    blocks = np.array(tokens, np.int32).reshape(-1, size)
    np.testing.assert_array_equal(keys(blocks, ROOT), twin.keys(blocks))


def test_a_key_continues_from_its_parent() -> None:
    tokens = np.arange(40, dtype=np.int32).reshape(5, 8)
    whole = np.asarray(keys(tokens, ROOT))
    np.testing.assert_array_equal(keys(tokens[2:], whole[1]), whole[2:])


def test_known_keys() -> None:
    assert [hex(word) for word in twin.keys(np.array([[0, 1, 2, 3]]))[0].tolist()] == KNOWN


@pytest.mark.parametrize("bit", [0, 1, 7, 16, 31])
def test_every_token_bit_changes_half_of_all_later_keys(bit: int) -> None:
    random = np.random.default_rng(bit)
    blocks = random.integers(0, 2**31, (64, 4), dtype=np.int64).astype(np.int32)
    other = blocks.copy()
    other[0, 1] ^= np.int32(1 << bit) if bit < 31 else np.int32(-(2**31))
    changed = np.asarray(keys(blocks, ROOT)) ^ np.asarray(keys(other, ROOT))
    share = np.unpackbits(changed.view(np.uint8)).mean()
    assert 0.47 < share < 0.53


def test_small_prompts_do_not_collide() -> None:
    blocks = np.stack(np.meshgrid(*[np.arange(40)] * 3), -1).reshape(-1, 1, 3).astype(np.int32)
    found = np.asarray(jax.jit(jax.vmap(fingerprint.keys, (0, None)))(blocks, ROOT)).reshape(-1, 4)
    assert len(np.unique(found, axis=0)) == len(blocks)
    for word in range(4):
        assert len(np.unique(found[:, word])) > 0.99 * len(blocks)


# RTP-LLM's conformance vectors for cache keys, and the key list of a sequence that grows.


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

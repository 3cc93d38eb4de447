"""Prefix keys computed on the device, beside their twin."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.keys import fingerprint
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

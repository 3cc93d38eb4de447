"""Tokens hashed in a step, and whole prompts, against their blocks one by one; sums and maxima up to each place."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from hkv.cache.spans import running_max, running_sum
from hkv.cache.state import HASH_WORDS
from hkv.cache.token_hashing import hash_prompts, hash_tokens
from hkv.keys.fingerprint import ROOT
from reference.keys import fingerprint

hashed, prompts_hashed = jax.jit(hash_tokens), jax.jit(hash_prompts, static_argnums=4)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8, 9])
def test_rows_hash_their_tokens_a_few_at_a_time_as_whole_prompts_are_hashed(size):
    tokens = np.arange(1, 37, dtype=np.int32) * 7919
    whole = fingerprint.keys(tokens[: 36 // size * size].reshape(-1, size), ROOT).tolist()
    tails, found = np.zeros((2, HASH_WORDS), np.uint32), {}
    tails[:, :4] = ROOT
    for start, count in ((0, 1), (1, 4), (5, 2), (7, 1), (8, 13), (21, 15)):
        places = np.zeros(40, np.int32)
        places[3 : 3 + count] = tokens[start : start + count]
        where = np.int32([start, 0]), np.int32([3, 20]), np.int32([count, 0])
        result = jax.device_get(hashed(np.int32(size), tails, *where, places))
        assert (result.tails[1] == tails[1]).all()
        tails = result.tails
        for piece in np.flatnonzero(result.filled):
            assert result.request[piece] == 0
            found[int(result.column[piece])] = result.keys[piece].tolist()
    assert [found[column] for column in range(len(whole))] == whole
    assert len(found) == len(whole)


@pytest.mark.parametrize("size", [1, 3, 6, 8])
def test_prompts_are_hashed_as_their_blocks_one_by_one(size):
    tokens, counts = np.arange(60, dtype=np.int32).reshape(3, 20) * 7919, np.int32([20, 0, 13])
    roots = np.array([ROOT, ROOT, [1, 2, 3, 4]], np.uint32)
    for columns in (9, 30):
        limit = np.minimum(counts, columns * size)
        found = np.asarray(prompts_hashed(np.int32(size), roots, tokens, limit, columns))
        assert found.shape == (3, columns, 4)
        for request, count in enumerate(limit):
            whole = count // size
            blocks = tokens[request, : whole * size].reshape(-1, size)
            assert found[request, :whole].tolist() == fingerprint.keys(blocks, roots[request].tolist()).tolist()
            assert not found[request, whole:].any()


@pytest.mark.parametrize("size", [1, 7, 16, 17, 64, 65, 500])
def test_places_up_to_each_are_summed_and_compared_in_lines(size):
    values = np.random.default_rng(size).integers(0, 1000, (2, size)).astype(np.int32)
    assert jax.jit(running_sum)(values).tolist() == np.cumsum(values, axis=1).tolist()
    assert jax.jit(running_max)(values[0]).tolist() == np.maximum.accumulate(values[0]).tolist()

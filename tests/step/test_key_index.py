"""The index of keys finds what a search of all blocks finds, through evictions, duplicates and a log that runs over.

Tokens are hashed in steps and as whole prompts as their blocks one by one.
"""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

from hkv.cache import state as states
from hkv.cache.arrivals import jitted as arrive
from hkv.cache.key_index import bring_up_to_date, look_up
from hkv.cache.spans import running_max, running_sum
from hkv.cache.state import HASH_WORDS, SLOTS, StepCounter, StepState
from hkv.cache.step import find
from hkv.cache.token_hashing import hash_prompts, hash_tokens
from hkv.keys.fingerprint import ROOT
from reference.keys import fingerprint
from tests.reference.build import config as build
from tests.step.compiled_step import copies, made
from tests.step.test_arrivals import arrivals

BLOCKS, GROUPS = 1500, 3
updated = jax.jit(bring_up_to_date)
looked_up = jax.jit(look_up)


class Host:
    """Registrations and evictions as steps make them, in NumPy."""

    def __init__(self, words: int) -> None:
        _, state = states.init(build("full:2,swa:2:6,full:2", num_blocks=BLOCKS), rows=1, row=4)
        self.arrays = {name: np.array(value) for name, value in vars(state).items()}
        self.draw = np.random.default_rng(words)
        # With few words many keys are equal, and more begin alike.
        self.pool = self.draw.integers(0, words, (900, 4), np.uint32) * np.uint32(2**32 // words)

    def register(self, count: int) -> None:
        refs, keys, log, counters = (self.arrays[name] for name in ("refs", "keys", "log", "counters"))
        for block in self.draw.integers(1, BLOCKS, count):
            refs[block] = 1
            stamp = counters[StepCounter.REGISTERED]
            keys[block] = *self.pool[self.draw.integers(900)], self.draw.integers(GROUPS), np.uint32(stamp)
            log[stamp % len(log)] = block
            counters[StepCounter.REGISTERED] += 1

    def evict(self, count: int) -> None:
        self.arrays["refs"][self.draw.integers(1, BLOCKS, count)] = 0

    def update(self) -> StepState:
        after = updated(StepState(**self.arrays))
        self.arrays |= {"index": np.array(after.index), "counters": np.array(after.counters)}
        return after


@pytest.mark.parametrize("words", [2, 4, 2**31])
def test_the_index_finds_what_a_search_of_all_blocks_finds(words):
    host = Host(words)
    for registered, evicted in ((40, 0), (700, 300), (0, 500), (3, 2), (2500, 1400), (600, 20), (5000, 0)):
        host.register(registered)
        host.evict(evicted)
        state = host.update()
        for group in range(GROUPS):
            asked = np.ones(900, bool)
            asked[::7] = False
            found = looked_up(state, np.full(900, group, np.int32), host.pool, asked)
            same = np.where(asked, find(state, np.int32(group), host.pool), 0)
            np.testing.assert_array_equal(found, same)
        assert np.asarray(found).any() == bool(host.arrays["refs"].any())


def test_slots_are_used_again():
    """A table that has seen many times its size of registrations still has every block near its key."""
    host = Host(2**31)
    for _ in range(30):
        host.register(1200)
        host.update()
    assert host.arrays["counters"][StepCounter.REGISTERED] > 4 * len(host.arrays["index"])
    assert host.arrays["counters"][StepCounter.PROBES] < 24


def test_the_numbers_of_registrations_wrap_around():
    host = Host(2**31)
    host.arrays["counters"][[StepCounter.REGISTERED, StepCounter.INDEXED]] = 2**31 - 20
    with np.errstate(over="ignore"):
        host.register(40)
    state = host.update()
    keyed = np.flatnonzero(host.arrays["refs"])
    keys = host.arrays["keys"][keyed]
    found = np.asarray(looked_up(state, keys[:, 4].astype(np.int32), keys[:, :4], np.ones(len(keyed), bool)))
    assert (host.arrays["keys"][found, :5] == keys[:, :5]).all()


def test_requests_that_arrive_copy_nothing_of_the_pools_size():
    """And nothing is computed for every block: no array of that size is made but those that are changed in place."""
    _, parameters, state = made()
    text = arrive.lower(parameters, state, arrivals({})).compile().as_text()
    assert copies(text) == []
    sizes = (f"[{len(state.refs)}", f"[{len(state.queue)}", f"[{SLOTS * len(state.queue)}")
    passed_on = re.compile(r" (parameter|get-tuple-element|while|call|conditional|tuple|bitcast)\(")
    in_place = re.compile(r"scatter|dynamic-update-slice")
    for line in text.splitlines():
        made_by = line.partition(" = ")[2]
        if any(size in made_by.partition("{")[0] for size in sizes) and not passed_on.search(line):
            assert in_place.search(made_by), line


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

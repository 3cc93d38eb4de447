"""The index of keys finds what a search of all blocks finds, through evictions, duplicates and a log that runs over."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

from hkv.cache import state as states
from hkv.cache.arrivals import jitted as arrive
from hkv.cache.key_index import bring_up_to_date, look_up
from hkv.cache.state import SLOTS, StepCounter, StepState
from hkv.cache.step import find
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

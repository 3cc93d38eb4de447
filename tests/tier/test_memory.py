"""The memory tier against a plain model: order of use, bytes, pins."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hkv.errors import OperationError
from hkv.tier.tier import MemoryTier

CAPACITY = 100
KEYS = st.sampled_from([b"a", b"b", b"c", b"d"])


class MemoryTierMachine(RuleBasedStateMachine):
    """A list of `[key, data, pins]`, least recently used first, is the model."""

    def __init__(self):
        super().__init__()
        self.tier = MemoryTier(CAPACITY, "numpy")
        self.model: list[list] = []

    def entry(self, key):
        return next((entry for entry in self.model if entry[0] == key), None)

    @rule(key=KEYS, size=st.integers(0, 60), fill=st.integers(0, 255))
    def store(self, key, size, fill):
        data = np.full(size, fill, np.uint8)
        old = self.entry(key)
        room = sum(len(entry[1]) for entry in self.model if entry[2] == 0 or entry is old)
        used = sum(len(entry[1]) for entry in self.model)
        fits = CAPACITY - used + room >= size and not (old and old[2])
        assert self.tier.store(key, data) is fits
        if not fits:
            return
        if old:
            self.model.remove(old)
        while sum(len(entry[1]) for entry in self.model) + size > CAPACITY:
            self.model.remove(next(entry for entry in self.model if entry[2] == 0))
        self.model.append([key, data, 0])

    @rule(key=KEYS)
    def retrieve(self, key):
        entry = self.entry(key)
        data = self.tier.retrieve(key)
        assert (data is None) == (entry is None)
        if entry:
            assert np.array_equal(data, entry[1])
            self.model.remove(entry)
            self.model.append(entry)

    @rule(key=KEYS)
    def pin(self, key):
        entry = self.entry(key)
        assert self.tier.pin(key) is (entry is not None)
        if entry:
            entry[2] += 1

    @precondition(lambda self: any(entry[2] for entry in self.model))
    @rule(data=st.data())
    def unpin(self, data):
        entry = data.draw(st.sampled_from([entry for entry in self.model if entry[2]]))
        self.tier.unpin(entry[0])
        entry[2] -= 1

    @rule(key=KEYS)
    def evict(self, key):
        entry = self.entry(key)
        if entry and entry[2]:
            with pytest.raises(OperationError):
                self.tier.evict(key)
            return
        assert self.tier.evict(key) is (entry is not None)
        if entry:
            self.model.remove(entry)

    @invariant()
    def agrees(self):
        assert self.tier.keys == tuple(entry[0] for entry in self.model)
        assert self.tier.used_bytes == sum(len(entry[1]) for entry in self.model) <= CAPACITY


TestMemoryTier = MemoryTierMachine.TestCase


def test_what_is_stored_is_a_copy():
    tier = MemoryTier(100, "numpy")
    data = np.arange(10, dtype=np.uint8)
    tier.store(b"a", data)
    data[:] = 0
    stored = tier.retrieve(b"a")
    assert np.array_equal(stored, np.arange(10))
    with pytest.raises(ValueError, match="read-only"):
        stored[0] = 1


def test_pinned_host_memory_holds_the_same_bytes():
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    if "pinned_host" not in kinds:
        pytest.skip(f"this device has no pinned host memory, only {sorted(kinds)}")
    tier = MemoryTier(100, "pinned_host")
    data = np.arange(64, dtype=np.uint8)
    assert tier.store(b"a", data)
    expected = data.copy()
    data[:] = 0
    stored = tier.retrieve(b"a")
    assert stored.sharding.memory_kind == "pinned_host"
    assert np.array_equal(np.asarray(stored), expected)


@pytest.mark.parametrize("data", [np.zeros((2, 2), np.uint8), np.zeros(2, np.float32)])
def test_only_flat_bytes_are_stored(data):
    tier = MemoryTier(100, "numpy")
    with pytest.raises(OperationError, match="flat uint8"):
        tier.store(b"a", data)


def test_an_unknown_placement_is_named():
    with pytest.raises(OperationError, match="placement = 'disk'"):
        MemoryTier(100, "disk")

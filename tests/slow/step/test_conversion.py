"""Requests arrive in the sequential cache, decode in whole steps, and go back: nothing is lost on the way."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.cache import step as serving
from hkv.cache.conversion import to_operations, to_steps
from hkv.cache.ragged import packed
from hkv.cache.state import StepBatch, StepRequest, StepRow
from hkv.dialects.vllm import machine as cache
from hkv.dialects.vllm.rules.operations import Batch, Code, Column
from hkv.errors import OperationError
from hkv.spec import FullAttention
from hkv.state.state import Buckets
from hkv.state.status import Status
from reference.keys.fingerprint import keys as keys_of
from tests.slow.step.test_checkpoints import states
from tests.step.sample import configs

R, W = 4, 56
BUCKETS = Buckets(blocks=64, requests=R, groups=4, row=W, chain=64, keys=1024)


class Served:
    """The sequential cache with requests of known tokens, their fingerprints numbered in the order of appearance."""

    def __init__(self, config) -> None:
        self.config = config
        self.parameters, self.state = cache.init(config, BUCKETS)
        self.numbers: dict[bytes, int] = {}
        self.tokens: list[list[int]] = [[] for _ in range(R)]

    def number(self, key: bytes) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def keys(self, slot: int) -> list[int]:
        size = self.config.hash_block_size
        whole = np.array(self.tokens[slot][: len(self.tokens[slot]) // size * size], np.int64).reshape(-1, size)
        return [self.number(key.astype("<u4").tobytes()) for key in keys_of(whole)]

    def run(self, batch: Batch) -> np.ndarray:
        self.state, results = cache.run(self.parameters, self.state, batch.build(least=64, least_payload=1024))
        return np.asarray(results.table)[:, Column.STATUS]

    def arrive(self, slot: int, tokens: list[int]) -> bool:
        self.tokens[slot] = list(tokens)
        batch = Batch().add(Code.REQUEST, slot, self.keys(slot), tokens=len(tokens)).add(Code.LOOKUP, slot)
        return self.run(batch.add(Code.ALLOCATE, slot, new=-1, hit=-1, advance=1))[2] == Status.OK

    def leave(self, slot: int, running: bool) -> None:
        self.tokens[slot] = []
        batch = Batch().add(Code.FREE, slot) if running else Batch()
        assert not self.run(batch.add(Code.DROP, slot)).any()

    def step(self, new: list[list[int]]) -> list[int]:
        """Performs a step as single operations; the status of each row's allocation."""
        batch, places = Batch(), []
        for slot, tokens in enumerate(new):
            if tokens:
                batch.add(Code.RETIRE, slot, tokens=len(self.tokens[slot]))
        for slot, tokens in enumerate(new):
            if tokens:
                before = len(self.keys(slot))
                self.tokens[slot] += tokens
                batch.add(Code.APPEND, slot, self.keys(slot)[before:], tokens=len(tokens))
                places.append((slot, len(batch)))
                batch.add(Code.ALLOCATE, slot, new=len(tokens), advance=1)
        status = self.run(batch)
        return [int(status[place]) for _, place in places]

    def as_steps(self):
        keys = np.array([np.frombuffer(key, "<u4") for key in self.numbers], np.uint32).reshape(-1, 4)
        size = self.config.hash_block_size
        return to_steps(self.config, self.state, keys, [t[len(t) // size * size :] for t in self.tokens])


def test_empty_caches_are_each_others_images():
    from tests.reference.build import config as build

    config = build("full:2,swa:4:5", num_blocks=50, max_model_len=96)
    served = Served(config)
    _, empty = serving.init(config, rows=R, row=W, blocks=64, chain=64)
    jax.tree.map(np.testing.assert_array_equal, served.as_steps(), empty)
    back = to_operations(config, served.as_steps(), BUCKETS, served.number)
    jax.tree.map(np.testing.assert_array_equal, back, served.state)


def one_key(config) -> bool:
    """True if no block of single operations has a key that ends inside it, which conversion refuses."""
    specs = config.topology.specs
    return not any(spec.reads_all and config.block_size(g) != config.hash_block_size for g, spec in enumerate(specs))


@settings(max_examples=15)
@given(config=configs(least_blocks=24).filter(one_key), data=st.data())
def test_steps_after_arrivals_and_operations_after_steps(config, data):
    served = Served(config)
    parameters = serving.init(config, rows=R, row=W, blocks=64)[0]
    prompt = [data.draw(st.integers(0, 1)) for _ in range(30)]
    running = []
    for slot in range(R):
        tokens = [*prompt[: data.draw(st.integers(1, 24))], data.draw(st.integers(0, 1))]
        running.append(served.arrive(slot, tokens))
        if not running[slot] or data.draw(st.integers(0, 4)) == 0:
            served.leave(slot, running[slot])
            running[slot] = False
    state = served.as_steps()
    for _ in range(data.draw(st.integers(1, 5))):
        new = [[data.draw(st.integers(0, 1))] if running[slot] else [] for slot in range(R)]
        counts = np.array([len(tokens) for tokens in new], np.int32)
        tokens = np.array([[*tokens, 0][:1] for tokens in new], np.int32)
        zeros, rows = np.zeros(R, np.int32), np.arange(R, dtype=np.int32)
        batch = StepBatch(*packed(tokens, counts), rows, zeros, zeros)
        state, result = serving.jitted(4 * W)(parameters, state, batch)
        if result.status.any() or not counts.any():
            return
        assert not any(served.step(new))
        assert_same_steps(state, served.as_steps())
    back = to_operations(config, state, BUCKETS, served.number)
    again = Served(config)
    again.numbers, again.tokens, again.state = served.numbers, served.tokens, back
    assert_same_steps(again.as_steps(), state)
    for slot in range(R):
        if running[slot]:
            served.leave(slot, True)
            assert not again.run(Batch().add(Code.FREE, slot))[0]
            again.run(Batch().add(Code.DROP, slot))
    for each in (served, again):
        each.run(Batch().add(Code.STEP))
    arrived = served.arrive(0, prompt)
    assert again.arrive(0, prompt) == arrived
    if not arrived:
        for each in (served, again):
            each.leave(0, False)
    assert_same_steps(again.as_steps(), served.as_steps())


def test_states_inside_chunks_come_over():
    """Planned by single operations, then by steps, and known to single operations again."""
    from tests.reference.build import config as build

    config = build([FullAttention(block_size=2), states(2, scratch=1)], num_blocks=50, max_model_len=96)
    served = Served(config)
    parameters = serving.init(config, rows=R, row=W, blocks=64)[0]
    assert served.arrive(0, [1, 2, 3, 4, 5])
    state = served.as_steps()
    assert exported(state) == (4, 1)
    for new, left in (([6], (0, 0)), ([7, 8, 9, 1, 2], (10, 4))):
        counts, tokens = np.int32([len(new), 0, 0, 0]), np.zeros((R, 5), np.int32)
        tokens[0, : len(new)] = new
        zeros, rows = np.zeros(R, np.int32), np.arange(R, dtype=np.int32)
        batch = StepBatch(*packed(tokens, counts), rows, zeros, zeros)
        state, result = serving.jitted(4 * W)(parameters, state, batch)
        assert not result.status.any()
        assert served.step([new, [], [], []]) == [Status.OK]
        assert exported(state) == left
        assert_same_steps(state, served.as_steps())
    served.state = to_operations(config, state, BUCKETS, served.number)
    assert exported(served.as_steps()) == (10, 4)


def test_no_column_is_looked_at_again_where_a_state_stands():
    """The state after 4 tokens, at the entry of one after 6, whose step has not come back."""
    from tests.reference.build import config as build

    served = Served(build([FullAttention(block_size=4), states(2)], num_blocks=50, max_model_len=96))
    assert served.arrive(0, [1, 2, 3, 4, 5, 6, 7])
    assert served.run(Batch().add(Code.ALLOCATE, 0, new=1, hit=0, in_flight=7))[0] == Status.OK
    assert exported(served.as_steps()) == (0, 0)
    groups = np.asarray(served.as_steps().requests)[0, len(StepRequest) :].reshape(-1, 2)
    assert groups[StepRow.CACHED].tolist() == [1, 3]


def exported(state) -> tuple[int, int]:
    """EXPORT and EXPORT_ENTRY of the recurrent group of row 0."""
    return tuple(int(value) for value in np.asarray(state.requests)[0].reshape(-1, 2)[-3:-1, 1])


def assert_same_steps(one, other) -> None:
    """Equal but for the places in the ring and the numbers that registration counts by."""
    one, other = ({name: np.asarray(value) for name, value in vars(each).items()} for each in (one, other))
    for name in ("refs", "rows", "requests"):
        np.testing.assert_array_equal(one[name], other[name])
    rings = [[each["queue"][p % len(each["queue"])] for p in range(*each["counters"][:2])] for each in (one, other)]
    assert rings[0] == rings[1]
    known = one["refs"] % 2 == 1
    np.testing.assert_array_equal(one["keys"][known, :5], other["keys"][known, :5])
    assert first_blocks(one, known) == first_blocks(other, known)
    assert one["counters"][3] == other["counters"][3]
    live = one["requests"][:, StepRequest.LIVE] == 1
    np.testing.assert_array_equal(one["hashing"][live, :4], other["hashing"][live, :4])


def first_blocks(arrays, known):
    order = sorted(np.flatnonzero(known).tolist(), key=lambda block: int(arrays["keys"][block, 5]))
    return sorted((tuple(arrays["keys"][block, :5].tolist()), place) for place, block in by_key(arrays, order))


def by_key(arrays, order):
    seen: dict[tuple, list[int]] = {}
    for block in order:
        seen.setdefault(tuple(arrays["keys"][block, :5].tolist()), []).append(block)
    return [(tuple(blocks), blocks[0]) for blocks in seen.values()]


def test_misuse_is_named():
    from tests.reference.build import config as build

    config = build("full:4,swa:4:5", num_blocks=50, max_model_len=96)
    served = Served(config)
    assert served.arrive(0, [1] * 9)
    keys = np.zeros((len(served.numbers), 4), np.uint32)
    with pytest.raises(OperationError, match=r"tails\[0\] = 0: expected 1 tokens"):
        to_steps(config, served.state, keys, [[]] * R)
    with pytest.raises(OperationError, match="a fingerprint for prefix key"):
        to_steps(config, served.state, keys[:0], [[1]] * R)
    state = served.as_steps()
    with pytest.raises(OperationError, match="from 0 up to 1024"):
        to_operations(config, state, BUCKETS, lambda key: 5000)
    with pytest.raises(OperationError, match="4 requests and rows of 56 blocks"):
        to_operations(config, state, Buckets(64, 8, 4, W, 64, 1024), served.number)

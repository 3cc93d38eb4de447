"""Refusals: a status says why, and nothing is taken."""

from __future__ import annotations

import numpy as np
import pytest

from hkv.dialects.vllm import machine as cache
from hkv.dialects.vllm.rules.operations import Batch, Code, Column
from hkv.errors import OperationError
from hkv.state.state import Counter
from hkv.state.status import Status
from tests.cache.build import BUCKETS, config, prompt, run, start, statuses


def check(batch: Batch, want: list[Status], num_blocks: int = 40):
    parameters, state = start(config(num_blocks=num_blocks))
    state, results = run(parameters, state, batch)
    assert statuses(results, batch) == [int(status) for status in want]
    return state, results


def test_a_pool_that_is_too_small() -> None:
    batch = prompt(Batch(), 0, range(20), must_fit=1)
    state, _ = check(batch, [Status.OK, Status.OK, Status.NO_ROOM_FOR_SEQUENCE], num_blocks=12)
    assert np.asarray(state.counters)[Counter.FREE] == 11


def test_reserved_blocks() -> None:
    batch = prompt(Batch(), 0, range(4), reserved=36)
    check(batch, [Status.OK, Status.OK, Status.NO_ROOM])


def test_slots() -> None:
    batch = Batch().add(Code.LOOKUP, 99).add(Code.LOOKUP, -1).add(Code.FREE, 0).add(Code.REQUEST, 0, tokens=3)
    batch.add(Code.REQUEST, 0, tokens=3).add(Code.FREE, 0).add(Code.COMMIT, 0)
    nowhere = Status.NO_SUCH_SLOT
    state, _ = check(
        batch, [nowhere, nowhere, Status.NOT_RUNNING, Status.OK, Status.NOT_WAITING] + [Status.NOT_RUNNING] * 2
    )
    assert np.asarray(state.counters)[Counter.DROPPED] == 2


def test_hits_go_stale() -> None:
    batch = prompt(Batch(), 0, range(4)).add(Code.REQUEST, 1, range(4), tokens=17).add(Code.LOOKUP, 1)
    batch.add(Code.EVICT, payload=[1]).add(Code.ALLOCATE, 1, new=1, hit=16)
    check(batch, [Status.OK] * 6 + [Status.STALE_HIT])


def test_keys_out_of_range() -> None:
    batch = Batch().add(Code.REQUEST, 0, [0, BUCKETS.keys], tokens=8).add(Code.REQUEST, 0, range(65), tokens=8)
    batch.add(Code.LOOKUP, 0).add(Code.REQUEST, 0, range(2), tokens=8, key_start=255)
    check(batch, [Status.KEYS_FULL] * 2 + [Status.NO_SUCH_SLOT, Status.OUT_OF_RANGE])


def test_blocks_out_of_range_are_dropped_and_counted() -> None:
    batch = Batch().add(Code.EVICT, payload=[3, 40, -1, 1 << 30])
    state, results = check(batch, [Status.OUT_OF_RANGE])
    assert results.table[0, Column.VALUE] == 3
    assert np.asarray(state.counters)[Counter.DROPPED] == 3


def test_rows_that_would_overflow() -> None:
    batch = Batch().add(Code.REQUEST, 0, tokens=90).add(Code.ALLOCATE, 0, new=200).add(Code.ALLOCATE, 0)
    check(batch, [Status.OK, Status.ROW_FULL, Status.NOTHING_TO_ALLOCATE], num_blocks=256)


def test_advancing_too_far() -> None:
    batch = prompt(Batch(), 0, range(4)).add(Code.ADVANCE, 0, tokens=1).add(Code.COMMIT, 0, tokens=17)
    check(batch, [Status.OK] * 3 + [Status.NOT_COMPUTED] * 2)


def test_a_cache_in_use_is_not_reset() -> None:
    batch = prompt(Batch(), 0, range(4)).add(Code.RESET).add(Code.FREE, 0).add(Code.RESET)
    check(batch, [Status.OK] * 3 + [Status.IN_USE, Status.OK, Status.OK])


def test_debug_mode_raises() -> None:
    parameters, state = start()
    _, results = run(parameters, state, Batch().add(Code.FREE, 0))
    with pytest.raises(OperationError, match=r"operations\[0\].*NOT_RUNNING"):
        cache.check(results)


def test_operations_that_a_program_does_not_know() -> None:
    parameters, state = start()
    batch = Batch().add(Code.STEP).build(16, 64)
    _, results = cache.run(parameters, state, batch, only=(Code.DROP,))
    assert np.asarray(results.table)[0, 0] == Status.UNKNOWN_OPERATION

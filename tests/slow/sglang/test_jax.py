"""Promises of the compiled cache under SGLang's rules besides its answers: no array copied, lanes, refusals by name."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from hkv.dialects.sglang import machine
from hkv.dialects.sglang.config import SGLangConfig
from hkv.dialects.sglang.rules.operations import SGLangBatch, SGLangCode, SGLangColumn, SGLangResults
from hkv.errors import ConfigError, OperationError
from hkv.machine.operations import Operations
from hkv.replay.verb import replay_trace
from hkv.spec import spec_from_text
from hkv.state.radix import Count, RadixNode, RadixRequest, RadixState, resized
from hkv.state.status import Status
from tests.cache.build import large_copies
from tests.sglang.test_dialect import CHATS

CONFIG = SGLangConfig(page_size=4, num_slots=(160, 80), window=8)
BUCKETS = machine.buckets_for(CONFIG, tokens=200)
PARAMETERS, EMPTY = machine.init(CONFIG, BUCKETS)

LARGE = 200
"""Elements from which on an array counts as one of a state's."""


def operations(batch: SGLangBatch) -> Operations:
    return batch.build(16, 1024)


@functools.cache
def program(lanes: int = 0) -> Any:
    """The program that all tests share, compiled once; for stacked states if there are lanes."""
    arguments = (PARAMETERS, EMPTY, operations(SGLangBatch().add(SGLangCode.EVICT)))
    function = machine.pure()
    if lanes:
        arguments = jax.tree.map(lambda x: np.stack([x] * lanes), arguments)
        function = jax.vmap(function)
    return jax.jit(function, donate_argnums=(1,)).lower(*arguments).compile()


def run(batch: SGLangBatch) -> tuple[RadixState, SGLangResults]:
    return jax.device_get(program()(PARAMETERS, EMPTY, operations(batch)))


def prompt(batch: SGLangBatch, slot: int, keys: range) -> SGLangBatch:
    """A request of whole pages comes and computes all its tokens."""
    batch.add(SGLangCode.ADMIT, slot, keys, tokens=4 * len(keys))
    return batch.add(SGLangCode.EXTEND, slot, length=4 * len(keys))


@pytest.mark.parametrize("lanes", [0, 2])
def test_no_array_is_copied(lanes: int) -> None:
    assert large_copies(program(lanes).as_text(), LARGE) == []


def test_lanes_do_what_single_states_do() -> None:
    batches = []
    for keys in (5, 7):
        batch = prompt(SGLangBatch(), 0, range(keys)).add(SGLangCode.FINISH, 0)
        prompt(batch, 1, range(keys + 1)).add(SGLangCode.CHECKPOINT, 1).add(SGLangCode.EVICT, full=4, window=4)
        batches.append((PARAMETERS, EMPTY, operations(batch)))
    together = jax.device_get(program(2)(*jax.tree.map(lambda *x: np.stack(x), *batches)))
    for lane, each in enumerate(batches):
        alone = jax.device_get(program()(*each))
        np.testing.assert_array_equal(together[1].table[lane], alone[1].table)
        for field in dataclasses.fields(RadixState):
            got, want = getattr(together[0], field.name)[lane], getattr(alone[0], field.name)
            np.testing.assert_array_equal(got.reshape(-1)[:-1], want.reshape(-1)[:-1], field.name)  # the last is spare


@pytest.mark.parametrize(
    ("batch", "status"),
    [
        (SGLangBatch().add(SGLangCode.EXTEND, 0, length=4), Status.NO_SUCH_SLOT),
        (SGLangBatch().add(SGLangCode.ADMIT, 99, [1], tokens=4), Status.NO_SUCH_SLOT),
        (SGLangBatch().add(SGLangCode.ADMIT, 0, [], tokens=4), Status.BAD_COUNT),
        (SGLangBatch().add(SGLangCode.ADMIT, 0, [], tokens=0), Status.BAD_LENGTH),
        (SGLangBatch().add(SGLangCode.ADMIT, 0, [1 << 20], tokens=4), Status.KEYS_FULL),
        (SGLangBatch().add(SGLangCode.ADMIT, 0, range(257), tokens=1028), Status.ROW_FULL),
        (prompt(SGLangBatch(), 0, range(30)), Status.NO_ROOM),
        (prompt(SGLangBatch(), 0, range(2)).add(SGLangCode.ADMIT, 0, [1], tokens=4), Status.NOT_WAITING),
        (prompt(SGLangBatch(), 0, range(2)).add(SGLangCode.EXTEND, 0, length=8), Status.BAD_LENGTH),
        (prompt(SGLangBatch(), 0, range(2)).add(SGLangCode.DECODE, 0, [3]), Status.BAD_COUNT),
        (
            prompt(SGLangBatch(), 0, range(2)).add(SGLangCode.CHECKPOINT, 0).add(SGLangCode.FINISH, 0, length=7),
            Status.BAD_LENGTH,
        ),
        (
            SGLangBatch().add(SGLangCode.ADMIT, 0, [1], tokens=4).add(SGLangCode.EXTEND, 0, length=4, track=5),
            Status.BAD_LENGTH,
        ),
        (SGLangBatch().add(SGLangCode.ADMIT, 0, [1], tokens=4).add(SGLangCode.DECODE, 0), Status.NOT_COMPUTED),
        (SGLangBatch().add(SGLangCode.ADMIT, 0, [1], tokens=4).add(SGLangCode.FINISH, 0), Status.NOT_COMPUTED),
    ],
)
def test_refusals_take_nothing(batch: SGLangBatch, status: Status) -> None:
    before, results = run(batch)
    assert results.table[len(batch) - 1, SGLangColumn.STATUS] == status
    shorter = SGLangBatch()
    shorter._rows, shorter._payload = batch._rows[:-1] or [np.zeros(16, np.int32)], batch._payload
    after, _ = run(shorter)
    for name in ("nodes", "keys", "mapping", "requests"):
        got, want = getattr(before, name), getattr(after, name)
        np.testing.assert_array_equal(got[:-2], want[:-2], name)
    np.testing.assert_array_equal(before.counters[Count.DROPPED + 1 : -1], after.counters[Count.DROPPED + 1 : -1])
    with pytest.raises(OperationError, match=status.name):
        machine.check(results)


@pytest.mark.parametrize("resumes", [False, True])
def test_states_that_others_hold_are_refused_by_name(resumes: bool) -> None:
    """A request's first pass takes its own state and two that are tracked; one that resumes at a node copies first."""
    parameters, state = machine.init(dataclasses.replace(CONFIG, states=2 if not resumes else 4, tracked=True), BUCKETS)
    batch = SGLangBatch().add(SGLangCode.ADMIT, 0, range(3), tokens=12).add(SGLangCode.EXTEND, 0, length=12, track=12)
    if resumes:
        batch.add(SGLangCode.CHECKPOINT, 0).add(SGLangCode.ADMIT, 1, range(3), tokens=13)
    after, results = jax.device_get(program()(parameters, state, operations(batch)))
    assert results.table[len(batch) - 1, SGLangColumn.STATUS] == Status.NO_STATE
    assert after.requests[1 if resumes else 0, RadixRequest.LIVE] == (not resumes)
    assert after.nodes[:-1, RadixNode.LOCKS].max() == resumes


def test_what_does_not_exist_is_counted() -> None:
    assert run(SGLangBatch().add(SGLangCode.ABORT, -1))[0].counters[Count.DROPPED] == 1


def test_a_state_moves_into_larger_sizes() -> None:
    state, _ = run(prompt(SGLangBatch(), 0, range(5)).add(SGLangCode.CHECKPOINT, 0))
    larger = dataclasses.replace(BUCKETS, requests=64, row=1024, keys=2 * BUCKETS.keys)
    moved = resized(state, larger)
    assert moved.buckets == larger
    np.testing.assert_array_equal(moved.rows[0, :256], state.rows[0])
    np.testing.assert_array_equal(moved.nodes, state.nodes)
    with pytest.raises(ConfigError, match="keys"):
        resized(moved, BUCKETS)
    with pytest.raises(ConfigError, match="pages"):
        resized(state, dataclasses.replace(BUCKETS, pages=1024))


@pytest.mark.parametrize(
    ("groups", "blocks", "step_tokens"),
    [
        ("full:16,swa:16:64", 240, 300),
        ("full:16,swa:16:64", [480, 120], 8192),
        ("full:16", 150, 300),
        ("full:16,mamba:16", [150, 40], 300),
        ("full:16,swa:16:64,mamba:16", [640, 240, 30], 8192),
    ],
)
def test_a_trace_fares_as_with_the_reference(groups: str, blocks: Any, step_tokens: int) -> None:
    """Every request's result, every step, all that is left in the cache; with small chunks requests are preempted."""
    given: dict[str, Any] = {"dialect": "sglang-0.5.23", "engine": "jax", "check": True, "limit": 30}
    given["dialect_options"] = {"schedule_policy": "replay"}
    specs = [spec_from_text(each) for each in groups.split(",")]
    found = replay_trace(CHATS, specs, blocks, step_tokens=step_tokens, **given)
    assert found.totals["hit_tokens"] > 0
    assert (found.totals["preemptions"] > 0) == (step_tokens == 300)

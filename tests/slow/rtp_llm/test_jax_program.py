"""Promises of the compiled cache under RTP-LLM's rules besides its answers: no array copied, few compilations, lanes,
refusals by name, no reference."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import jax
import numpy as np
import pytest

from hkv.dialects.rtp_llm import machine as rtp_cache
from hkv.dialects.rtp_llm.config import RtpConfig
from hkv.dialects.rtp_llm.engines import jax as rtp_jax
from hkv.dialects.rtp_llm.rules.operations import RtpBatch, RtpCode, RtpColumn, RtpResults
from hkv.dialects.rtp_llm.rules.parameters import RtpParameters, of_config
from hkv.errors import ConfigError, OperationError
from hkv.machine.operations import Operations
from hkv.model.topology import Topology
from hkv.state.pooled import Counter, PooledState, Role, resized
from hkv.state.status import Status
from tests.cache.build import large_copies
from tests.rtp_llm.build import FULL, LINEAR, SWA, group
from tests.rtp_llm.traffic import draw_config


def config(num_blocks: int = 40, **fields: Any) -> RtpConfig:
    """A full, a linear and a window group over one pool, blocks of 4 tokens."""
    groups = (group("full", FULL, 4), group("state", LINEAR, 4), group("window", SWA, 4, enable_prefix_reuse=True))
    return RtpConfig(topology=Topology(groups), num_blocks=(num_blocks,), linear_step=2, **fields)


BUCKETS = rtp_cache.buckets_for(config(), tokens=rtp_jax.BLOCKS * 4)
"""Sizes that every engine of these tests has."""

TREE = config(prefix_tree=True, independent_eviction=True)

LARGE = 200
"""Elements from which on an array counts as one of a state's."""


def start(num_blocks: int = 40, *, tree: bool = False) -> tuple[RtpParameters, PooledState]:
    """An empty cache."""
    if tree:
        return rtp_cache.init(TREE, rtp_cache.buckets_for(TREE, tokens=rtp_jax.BLOCKS * 4))
    return rtp_cache.init(config(num_blocks), BUCKETS)


def operations(batch: RtpBatch) -> Operations:
    """Operations, of one size for all tests."""
    return batch.build(rtp_jax.OPERATIONS, rtp_jax.PAYLOAD)


@functools.cache
def program(lanes: int = 0, tree: bool = False) -> Any:
    """The program that all tests share, compiled once; for stacked states if there are lanes."""
    arguments = (*start(tree=tree), operations(RtpBatch().add(RtpCode.EVICT)))
    function = rtp_cache.pure(ids=rtp_jax.IDS)
    if lanes:
        arguments = jax.tree.map(lambda x: np.stack([x] * lanes), arguments)
        function = jax.vmap(function)
    return jax.jit(function, donate_argnums=(1,)).lower(*arguments).compile()


def run(state: PooledState, batch: RtpBatch, parameters: RtpParameters | None = None) -> tuple[PooledState, RtpResults]:
    chosen = start()[0] if parameters is None else parameters
    return jax.device_get(program(0)(chosen, state, operations(batch)))


def statuses(results: RtpResults, batch: RtpBatch) -> list[Status]:
    return [Status(int(status)) for status in results.table[: len(batch), RtpColumn.STATUS]]


def prompt(batch: RtpBatch, slot: int, keys: range, **arguments: int) -> RtpBatch:
    """A request with whole blocks alone arrives and gets blocks for them."""
    fields = {"tokens": 4 * len(keys), "sequences": 1, **arguments}
    return batch.add(RtpCode.REQUEST, slot, keys, **fields).add(RtpCode.MALLOC, slot, reuse=1, device_cache=1)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("lanes", [0, 2])
def test_no_array_is_copied(lanes: int, tree: bool) -> None:
    assert large_copies(program(lanes, tree).as_text(), LARGE) == []


def test_lanes_do_what_single_states_do() -> None:
    arguments = []
    for num_blocks, keys in ((40, 5), (9, 6)):
        batch = prompt(RtpBatch(), 0, range(keys)).add(RtpCode.INSERT, 0).add(RtpCode.FREE, 0)
        prompt(batch, 1, range(keys), sequences=2).add(RtpCode.FORK, 1, [1, 1], copy=1).add(RtpCode.EXPORT, least=2)
        arguments.append((*start(num_blocks), operations(batch)))
    together = jax.device_get(program(2)(*jax.tree.map(lambda *x: np.stack(x), *arguments)))
    for lane, each in enumerate(arguments):
        alone = jax.device_get(program()(*each))
        for got, want in zip(jax.tree.leaves(together[1]), jax.tree.leaves(alone[1]), strict=True):
            np.testing.assert_array_equal(got[lane], want)
        for name in ("bitmap", "references", "items", "rows", "chains", "requests", "counters", "nodes", "uses"):
            got, want = getattr(together[0], name)[lane], getattr(alone[0], name)
            np.testing.assert_array_equal(got.reshape(-1)[:-1], want.reshape(-1)[:-1], name)  # the last is spare


@pytest.mark.parametrize(
    ("batch", "status"),
    [
        (RtpBatch().add(RtpCode.MALLOC, 0), Status.NO_SUCH_SLOT),
        (RtpBatch().add(RtpCode.REQUEST, 99, [1], tokens=4, sequences=1), Status.NO_SUCH_SLOT),
        (RtpBatch().add(RtpCode.REQUEST, 0, [], tokens=4, sequences=1), Status.BAD_COUNT),
        (RtpBatch().add(RtpCode.REQUEST, 0, [1], tokens=4, sequences=9), Status.BAD_COUNT),
        (RtpBatch().add(RtpCode.REQUEST, 0, [], tokens=0, sequences=1), Status.BAD_LENGTH),
        (RtpBatch().add(RtpCode.REQUEST, 0, [1 << 20], tokens=4, sequences=1), Status.KEYS_FULL),
        (RtpBatch().add(RtpCode.REQUEST, 0, range(129), tokens=516, sequences=1), Status.KEYS_FULL),
        (prompt(RtpBatch(), 0, range(128), reserve=40), Status.ROW_FULL),
        (prompt(RtpBatch(), 0, range(100)), Status.NO_ROOM_FOR_SEQUENCE),
        (prompt(RtpBatch(), 0, range(2)).add(RtpCode.REQUEST, 0, [1], tokens=4, sequences=1), Status.NOT_WAITING),
        (prompt(RtpBatch(), 0, range(2)).add(RtpCode.DROP, 0), Status.NOT_WAITING),
        (RtpBatch().add(RtpCode.REQUEST, 0, [1], tokens=4, sequences=1).add(RtpCode.INSERT, 0), Status.NOT_RUNNING),
        (prompt(RtpBatch(), 0, range(2)).add(RtpCode.FORK, 0, [1]), Status.OUT_OF_RANGE),
        (prompt(RtpBatch(), 0, range(2)).add(RtpCode.FORK, 0, [0] * 5), Status.BAD_COUNT),
        (prompt(RtpBatch(), 0, range(2)).add(RtpCode.HOLD, 0, sequence=1), Status.OUT_OF_RANGE),
        (prompt(RtpBatch(), 0, range(2)).add(RtpCode.HOLD, 0, role=3), Status.OUT_OF_RANGE),
        (RtpBatch().add(RtpCode.RELEASE, 0, [0, 1], role=1), Status.OUT_OF_RANGE),
        (RtpBatch().add(RtpCode.RELEASE, 0, [7, 1], role=1), Status.OUT_OF_RANGE),
        (RtpBatch().add(RtpCode.RELEASE, 0, [0], role=1), Status.BAD_COUNT),
        (prompt(RtpBatch(), 0, range(2)).add(RtpCode.PEAK, 0, tokens=-1), Status.BAD_LENGTH),
    ],
)
def test_refusals_take_nothing(batch: RtpBatch, status: Status) -> None:
    before, results = run(start()[1], batch)
    assert statuses(results, batch)[-1] == status
    shorter = RtpBatch()
    shorter._rows, shorter._payload = batch._rows[:-1] or [np.zeros(16, np.int32)], batch._payload
    after, _ = run(start()[1], shorter)
    held = [before.references[..., :3], before.bitmap[:, :-1], before.items[:-1]]
    for got, want in zip(held, [after.references[..., :3], after.bitmap[:, :-1], after.items[:-1]], strict=True):
        np.testing.assert_array_equal(got, want)
    with pytest.raises(OperationError, match=status.name):
        rtp_cache.check(results)


def test_what_does_not_exist_is_counted() -> None:
    batch = RtpBatch().add(RtpCode.FREE, -1).add(RtpCode.RELEASE, 0, [0, 5, 0, 6], role=int(Role.CACHE))
    state, results = run(start()[1], batch)
    assert state.counters[Counter.DROPPED] == 3
    assert results.table[1, RtpColumn.VALUE] == 2


def test_sizes_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="names"):
        rtp_cache.init(TREE, BUCKETS)
    with pytest.raises(ConfigError, match="groups"):
        of_config(config(), 2)


def test_states_are_small_pytrees() -> None:
    assert len(jax.tree.leaves(start()[1])) <= 9


def test_random_configurations_share_a_handful_of_sizes() -> None:
    found = set()
    for seed in range(300):
        drawn = draw_config(random.Random(seed))
        found.add(rtp_cache.buckets_for(drawn, tokens=rtp_jax.BLOCKS * drawn.block_size))
    assert sorted(each.names for each in found) == [0, 2]


def test_a_state_moves_into_larger_sizes() -> None:
    batch = prompt(RtpBatch(), 0, range(5), sequences=2).add(RtpCode.INSERT, 0)
    state, _ = run(start()[1], batch)
    larger = dataclasses.replace(BUCKETS, requests=64, sequences=16, row=256, chain=256, keys=2 * BUCKETS.keys)
    moved = resized(state, larger)
    assert moved.buckets == larger
    np.testing.assert_array_equal(moved.rows[0, :2, :, :128], state.rows[0, :2])
    np.testing.assert_array_equal(moved.items[:5, 2:], state.items[:5, 2:])
    with pytest.raises(ConfigError, match="keys"):
        resized(moved, dataclasses.replace(larger, keys=1))
    with pytest.raises(ConfigError, match="requests"):
        resized(moved, BUCKETS)
    with pytest.raises(ConfigError, match="blocks"):
        resized(state, dataclasses.replace(BUCKETS, blocks=4096))

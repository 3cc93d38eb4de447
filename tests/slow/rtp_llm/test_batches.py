"""Batches under RTP-LLM's rules, of configurations that are data: no array copied, lanes, refusals by name."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import numpy as np
import pytest

from hkv.dialects.rtp_llm.config import RtpConfig
from hkv.dialects.rtp_llm.plain import LAYOUT
from hkv.lowering import State
from hkv.lowering.programs import Program
from hkv.model.topology import Topology
from reference.dialects.rtp_llm.operations import perform_all
from reference.dialects.rtp_llm.records import Code, Role, Status
from tests.rtp_llm.batches import Batch, differing
from tests.rtp_llm.build import FULL, LINEAR, SWA, group

GROUPS = (group("full", FULL, 4), group("state", LINEAR, 4), group("window", SWA, 4, enable_prefix_reuse=True))

CONFIG = RtpConfig(topology=Topology(GROUPS), num_blocks=(40,), linear_step=2)
"""A full, a linear and a window group over one pool, blocks of 4 tokens."""

TREE = dataclasses.replace(CONFIG, num_blocks=(9,), prefix_tree=True, independent_eviction=True)

ROOM = {"keys": 64, "slots": 4, "batch": 4, "row": 24, "told": 96, "groups": 3, "blocks": 40}

LOOPS, SEGMENTS = 200, 215
"""Most loops, and conditional segments, of the program: call sites make compile time."""

PASSING = {"asked", "fills", "sequences.count"}
"""Numbers of operations and of fills, and the keys that a request has in use: they are noted before it is refused."""


def begun(batch: Batch, config: RtpConfig = CONFIG) -> State:
    """An empty cache with a batch, of one size for all tests."""
    long = Batch()
    for _ in range(16):
        long.add(Code.EVICT, numbers=[0] * 8)
    return batch.into(long.begun(config, **ROOM))


@functools.cache
def compiled(lanes: int = 0) -> Any:
    """The program that all tests share; for stacked states if there are lanes."""
    state, count = begun(Batch()), np.int32(1)
    if lanes:
        state, count = jax.tree.map(lambda x: np.stack([x] * lanes), (state, count))
    return Program(LAYOUT, perform_all, lanes=lanes > 0).lower(state, count).compile()


def run(batch: Batch, count: int) -> State:
    """The state after the first operations of a batch, which is what the text leaves that runs plainly."""
    state = begun(batch)
    cache = LAYOUT.restored(state)
    perform_all(cache, count)
    got = jax.device_get(compiled()(state, np.int32(count)))
    assert differing(got, LAYOUT.arrays_of(cache)) == []
    return got


def statuses(state: State, count: int) -> list[int]:
    return state["results.status"][..., 1 : count + 1].tolist()


def prompt(batch: Batch, slot: int, keys: range, **given: int) -> Batch:
    """A request with whole blocks alone arrives and gets blocks for them."""
    batch.add(Code.REQUEST, slot, keys, **{"tokens": 4 * len(keys), "sequences": 1, **given})
    return batch.add(Code.MALLOC, slot, reuse=1, device_cache=1)


@pytest.mark.parametrize("lanes", [0, 2])
def test_no_array_is_copied(lanes: int) -> None:
    text = compiled(lanes).as_text()
    assert not re.findall(r"= s32\[\d{2,}\]\S* copy\(", text)
    assert text.count(" while(") <= LOOPS
    assert text.count(" conditional(") <= SEGMENTS


def test_lanes_do_what_single_states_do() -> None:
    """Of different configurations, too."""
    states, counts = [], []
    for config, keys in ((CONFIG, 5), (TREE, 2)):
        batch = prompt(Batch(), 0, range(keys)).add(Code.INSERT, 0).add(Code.FREE, 0)
        prompt(batch, 1, range(keys), sequences=2).add(Code.FORK, 1, numbers=[1, 1], copy=1).add(Code.EXPORT, least=2)
        states.append(begun(batch, config))
        counts.append(np.int32(len(batch) - (config is TREE)))
    together = jax.device_get(compiled(2)(jax.tree.map(lambda *x: np.stack(x), *states), np.stack(counts)))
    for lane, (state, count) in enumerate(zip(states, counts, strict=True)):
        alone = jax.device_get(compiled()(state, count))
        assert differing({name: array[lane] for name, array in together.items()}, alone) == []
        assert statuses(alone, count) == [Status.OK] * count


@pytest.mark.parametrize(
    ("batch", "status"),
    [
        (Batch().add(Code.MALLOC, 0), Status.NO_SUCH_SLOT),
        (Batch().add(Code.FREE, -1), Status.NO_SUCH_SLOT),
        (Batch().add(Code.REQUEST, 99, [1], tokens=4, sequences=1), Status.NO_SUCH_SLOT),
        (Batch().add(Code.REQUEST, 0, [], tokens=4, sequences=1), Status.BAD_COUNT),
        (Batch().add(Code.REQUEST, 0, [1], tokens=4, sequences=9), Status.NO_SUCH_SEQUENCE),
        (Batch().add(Code.REQUEST, 0, [], tokens=0, sequences=1), Status.BAD_LENGTH),
        (prompt(Batch(), 0, range(2)).add(Code.MALLOC, 0, reuse=1, length=100), Status.ROW_FULL),
        (prompt(Batch(), 0, range(22)), Status.PERMANENT),
        (prompt(prompt(Batch(), 0, range(10)), 1, range(20, 30)), Status.RETRYABLE),
        (prompt(Batch(), 0, range(2)).add(Code.REQUEST, 0, [1], tokens=4, sequences=1), Status.NOT_EMPTY),
        (prompt(Batch(), 0, range(2)).add(Code.DROP, 0), Status.HAS_BLOCKS),
        (Batch().add(Code.REQUEST, 0, [1], tokens=4, sequences=1).add(Code.INSERT, 0), Status.HAS_NONE),
        (prompt(Batch(), 0, range(2)).add(Code.APPEND, 0, [], tokens=4), Status.BAD_COUNT),
        (prompt(Batch(), 0, range(2)).add(Code.APPEND, 0, [], tokens=-1), Status.BAD_LENGTH),
        (prompt(Batch(), 0, range(2)).add(Code.FORK, 0, numbers=[1]), Status.NO_SUCH_SEQUENCE),
        (prompt(Batch(), 0, range(2)).add(Code.FORK, 0, numbers=[0] * 5), Status.BAD_COUNT),
        (prompt(Batch(), 0, range(2)).add(Code.HOLD, 0, sequence=1), Status.NO_SUCH_SEQUENCE),
        (Batch().add(Code.END), Status.UNKNOWN),
    ],
)
def test_refusals_take_nothing(batch: Batch, status: Status) -> None:
    count = len(batch)
    after, before = run(batch, count), run(batch, count - 1)
    assert statuses(after, count) == [Status.OK] * (count - 1) + [status]
    assert {name for name in differing(after, before) if not name.startswith("results.")} <= PASSING


def test_what_is_not_held_is_counted() -> None:
    """The block that is held gives its reference back all the same."""
    batch = prompt(Batch(), 0, range(1)).add(Code.RELEASE, numbers=[0, 1, 0, 9, 0, 8], role=Role.REQUEST)
    after, before = run(batch, 3), run(batch, 2)
    assert statuses(after, 3) == [Status.OK, Status.OK, Status.NOT_HELD]
    assert after["dropped"] == 2
    assert after["pools.free"][1] == before["pools.free"][1] + 1


def test_a_batch_goes_on_from_a_state() -> None:
    first = prompt(Batch(), 0, range(3)).add(Code.INSERT, 0).add(Code.FREE, 0)
    state = run(first, len(first))
    second = prompt(Batch(), 1, range(3))
    after = jax.device_get(compiled()(second.into(state), np.int32(len(second))))
    assert after["results.value"][2] > 0

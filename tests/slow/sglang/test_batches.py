"""Batches under SGLang's rules: what the text leaves, no array copied, lanes, refusals by name."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from hkv.contract import registry
from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.batches import LAYOUT, Batch, Code, Status, check, empty_state, program, results
from hkv.dialects.sglang.config import SGLangConfig
from hkv.dialects.sglang.plain import settings
from hkv.errors import OperationError
from hkv.lowering import State
from hkv.oracle.record import Only, draw
from reference.dialects.sglang.operations import perform_all
from tests.sglang.batches import Noted, differing

ONLY = Only(dialect=structs.NAME)

CONFIG = SGLangConfig(page_size=4, num_slots=(160, 80), window=8)

LOOPS, SEGMENTS = (140, 190), (150, 215)
"""Most loops, and conditional segments, of the program of full attention and a window, and of that of any
configuration: call sites make compile time."""

PASSING = {"requests.chain", "full.due", "swa.due"}
"""Arrays and scalars that an operation writes before it is refused, and that nothing reads before it is written."""


def empty(config: SGLangConfig = CONFIG) -> State:
    return empty_state(config, known=False, keys=64, requests=4, row=16, operations=8, payload=64, room=63)


@functools.cache
def compiled(lanes: int = 0) -> Any:
    """The program that all tests share, its configuration in the state; for stacked states if there are lanes."""
    state, count = empty(), np.int32(1)
    if lanes:
        state, count = jax.tree.map(lambda x: np.stack([x] * lanes), (state, count))
    return program(lanes=lanes > 0).lower(state, count).compile()


def run(batch: Batch, config: SGLangConfig = CONFIG) -> State:
    """The state after a batch, which is what the text leaves that runs plainly."""
    begun = batch.into(empty(config))
    cache = LAYOUT.restored({**begun, "config.alone": 0})
    perform_all(cache, len(batch))
    got = jax.device_get(compiled()(begun, np.int32(len(batch))))
    assert differing(got, LAYOUT.arrays_of(cache)) == []
    return got


def prompt(batch: Batch, slot: int, keys: Sequence[int]) -> Batch:
    """A request of whole pages comes and computes all its tokens."""
    batch.add(Code.ADMIT, slot, keys, tokens=4 * len(keys))
    return batch.add(Code.EXTEND, slot, length=4 * len(keys))


def counted(text: str, config_is_known: bool) -> None:
    """No array is copied, and loops and segments are not more than there were."""
    assert not re.findall(r"= s32\[\d{2,}\]\S* copy\(", text)
    assert text.count(" while(") <= LOOPS[not config_is_known]
    assert text.count(" conditional(") <= SEGMENTS[not config_is_known]


@pytest.mark.parametrize("feature", ["full", "window", "states"])
def test_many_operations_in_one_dispatch_leave_the_same_arrays(feature: str) -> None:
    header, choices = draw(feature, 3, 2, ONLY)
    noted = Noted(header)
    registry.dialect_of(structs.NAME).drive(header, choices, noted.perform, 200)
    state, count = noted.state(), len(noted.batch)
    cache = LAYOUT.restored({**state, "config.alone": 0})
    perform_all(cache, count)
    assert noted.evictions == cache.evictions > 0
    known = {name: array for name, array in state.items() if name not in settings(noted.config)}
    made = program(noted.config)
    if feature == "window":
        counted(made.lower(known, count).compile().as_text(), config_is_known=True)
    got = jax.device_get(made(known, count))
    assert differing(got, LAYOUT.arrays_of(cache)) == []
    assert (results(got, count)["status"] == [result.status for result in cache.results[1 : count + 1]]).all()


@pytest.mark.parametrize("lanes", [0, 2])
def test_no_array_is_copied(lanes: int) -> None:
    counted(compiled(lanes).as_text(), config_is_known=False)


def test_lanes_do_what_single_states_do() -> None:
    """Of different configurations, too."""
    begun, counts = [], []
    for keys, config in ((5, CONFIG), (7, dataclasses.replace(CONFIG, num_slots=(240,), window=None, policy="lfu"))):
        batch = prompt(Batch(), 0, range(1, keys)).add(Code.FINISH, 0)
        prompt(batch, 1, range(1, keys + 1)).add(Code.CHECKPOINT, 1).add(Code.EVICT, full=4, window=4)
        begun.append(batch.into(empty(config)))
        counts.append(np.int32(len(batch)))
    together = jax.device_get(compiled(2)(jax.tree.map(lambda *x: np.stack(x), *begun), np.stack(counts)))
    for lane, (state, count) in enumerate(zip(begun, counts, strict=True)):
        alone = jax.device_get(compiled()(state, count))
        assert differing({name: array[lane] for name, array in together.items()}, alone) == []
        assert (results(together, count)["status"][lane] == results(alone, count)["status"]).all()
        assert results(alone, count)["status"].max() == Status.OK


@pytest.mark.parametrize(
    ("batch", "status"),
    [
        (Batch().add(Code.EXTEND, 0, length=4), Status.NO_SUCH_SLOT),
        (Batch().add(Code.ABORT, -1), Status.NO_SUCH_SLOT),
        (Batch().add(Code.ADMIT, 99, [1], tokens=4), Status.NO_SUCH_SLOT),
        (Batch().add(Code.ADMIT, 0, [], tokens=4), Status.BAD_COUNT),
        (Batch().add(Code.ADMIT, 0, [], tokens=0), Status.BAD_LENGTH),
        (Batch().add(Code.ADMIT, 0, range(1, 18), tokens=68), Status.ROW_FULL),
        (prompt(prompt(Batch(), 0, range(1, 14)), 1, range(21, 35)), Status.NO_ROOM),
        (prompt(Batch(), 0, [1, 2]).add(Code.ADMIT, 0, [1], tokens=4), Status.NOT_WAITING),
        (prompt(Batch(), 0, [1, 2]).add(Code.EXTEND, 0, length=8), Status.BAD_LENGTH),
        (prompt(Batch(), 0, [1, 2]).add(Code.DECODE, 0, [3]), Status.BAD_COUNT),
        (prompt(Batch(), 0, [1, 2]).add(Code.CHECKPOINT, 0).add(Code.FINISH, 0, length=7), Status.BAD_LENGTH),
        (Batch().add(Code.ADMIT, 0, [1], tokens=4).add(Code.EXTEND, 0, length=4, track=5), Status.BAD_LENGTH),
        (Batch().add(Code.ADMIT, 0, [1], tokens=4).add(Code.DECODE, 0), Status.NOT_COMPUTED),
        (Batch().add(Code.ADMIT, 0, [1], tokens=4).add(Code.FINISH, 0), Status.NOT_COMPUTED),
        (Batch().add(Code.END), Status.UNKNOWN),
    ],
)
def test_refusals_take_nothing(batch: Batch, status: Status) -> None:
    count = len(batch)
    after = run(batch)
    assert results(after, count)["status"].tolist() == [Status.OK] * (count - 1) + [status]
    before = jax.device_get(compiled()(batch.into(empty()), np.int32(count - 1)))
    assert {name for name in differing(after, before) if not name.startswith("results.")} <= PASSING
    with pytest.raises(OperationError, match=status.name):
        check(after, count)
    check(after, count - 1)


@pytest.mark.parametrize("resumes", [False, True])
def test_states_that_others_hold_are_refused_by_name(resumes: bool) -> None:
    """A request's first pass takes its own state and two that are tracked; one that resumes at a node copies first."""
    config = dataclasses.replace(CONFIG, states=2 if not resumes else 4, tracked=True)
    batch = Batch().add(Code.ADMIT, 0, [1, 2, 3], tokens=12).add(Code.EXTEND, 0, length=12, track=12)
    if resumes:
        batch.add(Code.CHECKPOINT, 0).add(Code.ADMIT, 1, [1, 2, 3], tokens=13)
    after = run(batch, config)
    assert results(after, len(batch))["status"][-1] == Status.NO_STATES
    assert after["requests.running"][3 if resumes else 2] == (not resumes)
    assert after["nodes.full_locks"].max() == resumes


def test_a_batch_goes_on_from_a_state() -> None:
    first, second = prompt(Batch(), 0, [1, 2]).add(Code.FINISH, 0), prompt(Batch(), 1, [1, 2, 3])
    state = compiled()(first.into(empty()), np.int32(len(first)))
    state = jax.device_get(compiled()(second.into(state), np.int32(len(second))))
    assert results(state, 2)["hit"].tolist() == [2, 0]


@pytest.mark.parametrize(
    ("argument", "batch"),
    [
        ("key", Batch().add(Code.ADMIT, 0, [0], tokens=4)),
        ("key", Batch().add(Code.ADMIT, 0, [65], tokens=4)),
        ("keys", Batch().add(Code.ADMIT, 0, [1] * 65, tokens=260)),
        ("operations", functools.reduce(lambda batch, _: batch.add(Code.EVICT), range(9), Batch())),
    ],
)
def test_a_batch_that_a_state_has_no_room_for_is_refused(argument: str, batch: Batch) -> None:
    with pytest.raises(OperationError) as error:
        batch.into(empty())
    assert error.value.argument == argument


def test_a_field_that_operations_have_not_is_refused() -> None:
    with pytest.raises(OperationError, match="token"):
        Batch().add(Code.DECODE, 0, token=3)

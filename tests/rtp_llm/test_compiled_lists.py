"""RTP-LLM's conformance vectors for pools, lists and dependencies, against the compiled cache.

Named as in the tests of the reference; `test_compiled_allocation.py` has those of whole allocations.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkv.dialects.rtp_llm.rules.operations import RtpCode, RtpColumn
from hkv.dialects.rtp_llm.rules.parameters import RtpParameters, View, has_block, shape_of, slots
from hkv.state.item_table import NAMESPACE
from hkv.state.pooled import Item, Role
from hkv.state.status import Status
from tests.rtp_llm.build import group, shape
from tests.rtp_llm.compiled import FULL, LINEAR, SWA, Compiled, alone, single, tiny_hybrid

OK = (Status.OK, 0)
N = -1


def available(cache: Compiled) -> int:
    return cache.reader.available(cache.state)


def test_allocation_is_all_or_nothing() -> None:
    cache = single()
    assert (cache.begin(20), cache.lists()) == (OK, [[1, 2, 3, 4, 5]])
    assert cache.begin(40, slot=1)[0] == Status.NO_ROOM_FOR_SEQUENCE
    assert (cache.lists(1), cache.free()) == ([[]], 4)


def test_released_blocks_are_free() -> None:
    cache = single()
    cache.begin(20)
    cache.do(RtpCode.RELEASE, numbers=[0, 1, 0, 2, 0, 3], role=int(Role.REQUEST))
    assert cache.free() == 7


def test_a_block_is_free_when_its_last_reference_goes() -> None:
    cache, seen = single(), []
    cache.begin(12)
    seen.append((cache.free(), available(cache)))
    cache.do(RtpCode.HOLD, role=int(Role.REQUEST))
    seen.append((cache.free(), available(cache)))
    cache.do(RtpCode.FREE)
    seen.append((cache.free(), available(cache)))
    cache.do(RtpCode.RELEASE, numbers=[0, 1, 0, 2, 0, 3], role=int(Role.REQUEST))
    seen.append((cache.free(), available(cache)))
    assert seen == [(6, 6), (6, 6), (6, 6), (9, 9)]


@pytest.mark.parametrize("block", [4, 0, 10])
def test_what_nobody_holds_cannot_be_released(block: int) -> None:
    cache = single()
    cache.begin(12)
    row, _ = cache.do(RtpCode.RELEASE, numbers=[0, block], role=int(Role.REQUEST))
    assert (Status(int(row[RtpColumn.STATUS])), row[RtpColumn.VALUE]) == (Status.OUT_OF_RANGE, 1)
    assert cache.free() == 6


def test_an_unseen_prefix_hits_nothing() -> None:
    cache = single()
    cache.cache({0: [1, 2]})
    assert cache.begin(12, keys=[103, 104, 105]) == OK


def test_a_prefix_is_matched_to_its_first_miss() -> None:
    cache = single(16)
    cached = cache.cache({0: [101, 102, 103, 104]})[0]
    assert cache.begin(20, keys=[101, 102, 103, 104, 105]) == (Status.OK, 16)
    assert cache.lists()[0][:4] == list(cached.values())
    assert cache.begin(20, slot=1, keys=[101, 102, 203, 104, 105]) == (Status.OK, 8)


def test_peak_from_a_list() -> None:
    """The vector's list has a literal block 0, which counts as allocated; compiled lists have 0 for holes alone."""
    linear = alone(LINEAR)
    linear.request(12)
    linear.place([[[False, True, True]]])
    assert linear.peak(4) == 1


@pytest.mark.parametrize(("remaining", "peak"), [(0, 3), (4, 5)])
def test_peak_of_a_batch(remaining: int, peak: int) -> None:
    linear = alone(LINEAR)
    linear.request(5, batch=2)
    assert linear.peak(remaining, width=2) == peak


def test_freeing_holes_is_nothing() -> None:
    linear = alone(LINEAR)
    for lists in ([[[False, False]]], [[[]]]):
        linear.request(8)
        linear.place(lists)
        linear.do(RtpCode.FREE)
        linear.do(RtpCode.DROP)
        assert (linear.free(), available(linear)) == (9, 9)


def test_a_referenced_block_needs_both_releases() -> None:
    linear = alone(LINEAR)
    linear.request(8)
    linear.place([[[False, True]]])
    linear.malloc(reuse=False)
    ((_, block),) = linear.lists()
    row, _ = linear.do(RtpCode.HOLD, role=int(Role.REQUEST))
    assert row[RtpColumn.VALUE] == 1
    linear.do(RtpCode.FREE)
    assert linear.free() == 8
    linear.do(RtpCode.RELEASE, numbers=[0, block], role=int(Role.REQUEST))
    assert linear.free() == 9


def test_window_need() -> None:
    lengths = []
    for reserve in (0, 1, 2, 5):
        window = alone(SWA)
        assert window.begin(8, reserve=reserve, reuse=False, device_cache=False) == OK
        lengths.append(len(window.lists()[0]))
    assert lengths == [2, 3, 3, 4]
    for current, needed in ((1, 2), (3, 0), (5, 0)):
        window = alone(SWA)
        window.request(10)
        window.place([[[True] * current]])
        assert window.malloc(reuse=False, device_cache=False, keep=True) == OK
        assert len(window.lists()[0]) - current == needed


@jax.jit
def _window(parameters: RtpParameters, tokens: Any) -> tuple[Any, Any]:
    """Slots of so many tokens, and whether the last four of them have blocks."""
    view = View(parameters.cache, parameters.groups.reshape(-1), None, parameters.groups.shape[0])
    swa = shape_of(view, jnp.int32(0))
    filled = slots(swa, tokens)
    no, false = jnp.int32(0), jnp.bool_(False)
    return filled, [(filled >= back) & has_block(swa, filled - back, filled, no, false) for back in (1, 2, 3, 4)]


def test_long_sequences_hold_two_blocks() -> None:
    tokens = np.arange(1, 1_000_001, dtype=np.int32)
    filled, last = jax.device_get(_window(alone(SWA, 4, 256, step=1).parameters, tokens))
    np.testing.assert_array_equal(filled, -(-tokens // 256))
    np.testing.assert_array_equal(last, [filled >= 1, filled >= 2, filled < 0, filled < 0])


def test_a_canonical_dependency_is_not_replaced() -> None:
    """A full group, whose keys are those of virtual blocks, is entered before a linear one with the same last key."""
    groups = (group("full", FULL, 4), group("linear", LINEAR, 4))
    cache = Compiled(groups, (20, 20), linear_step=1, cp_size=2)
    assert cache.begin(9, keys=[100, 101]) == OK
    cache.do(RtpCode.INSERT)
    logical, canonical = cache.state.items[100], cache.state.items[101]
    assert [int(item[Item.FLAGS]) // NAMESPACE for item in (logical, canonical)] == [1, 2]
    assert (canonical[Item.ORDINAL], canonical[Item.PARENT]) == (0, 0), "a root, not the second of the sequence's keys"
    assert cache.has(101, 0)
    assert cache.has(101, 1), "the linear group's block is there too"


def test_fewer_tokens_than_there_are_get_slots() -> None:
    """RTP-LLM `incr_seq_len_override`: a growing request asks for slots of other than all its tokens."""
    hybrid = tiny_hybrid(20)
    assert hybrid.begin(8, reuse=False, device_cache=False) == OK
    row, _ = hybrid.do(RtpCode.APPEND, numbers=range(700, 703), tokens=12)
    assert row[RtpColumn.STATUS] == Status.OK
    for length, wanted in ((12, "xxx"), (20, "xxxxx"), (26, "x" * 7)):
        row, _ = hybrid.do(RtpCode.MALLOC, length=length)
        assert row[RtpColumn.STATUS] == Status.OK
        assert shape(hybrid.lists()[1]) == wanted
    row, _ = hybrid.do(RtpCode.MALLOC, length=-1)
    assert row[RtpColumn.STATUS] == Status.BAD_LENGTH

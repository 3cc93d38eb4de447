"""RTP-LLM's conformance vectors for pools, lists and dependencies, against the compiled cache.

Named as in the tests of the reference; `tests/slow/rtp_llm/test_jax_lockstep.py` compares the two on random operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkv.dialects.rtp_llm import machine as rtp_cache
from hkv.dialects.rtp_llm.config import RtpConfig
from hkv.dialects.rtp_llm.engines import jax as rtp_jax
from hkv.dialects.rtp_llm.engines.jax_reading import Reader
from hkv.dialects.rtp_llm.rules.operations import RtpBatch, RtpCode, RtpColumn
from hkv.dialects.rtp_llm.rules.parameters import RtpParameters, View, has_block, shape_of, slots
from hkv.model.topology import Group, Topology
from hkv.state.item_table import NAMESPACE
from hkv.state.pooled import (
    COUNTER_WORDS,
    ITEM_WORDS,
    MARK_WORDS,
    POOL_WORDS,
    REQUEST_WORDS,
    Item,
    PoolCounter,
    Role,
    bitmap_of,
    members_of,
)
from hkv.state.status import Status
from tests.rtp_llm.build import FULL, LINEAR, SWA, group, shape

OK = (Status.OK, 0)
N = -1


class Compiled:
    """One cache, one operation at a time. Keys are small integers; each group has a pool if `num_blocks` is a tuple."""

    def __init__(self, groups: Sequence[Group], num_blocks: int | tuple[int, ...], **fields: Any) -> None:
        apart = isinstance(num_blocks, tuple)
        topology = Topology(tuple(groups), pools="independent" if apart else "shared")
        self.config = RtpConfig(topology=topology, num_blocks=num_blocks if apart else (num_blocks,), **fields)
        self.buckets = rtp_cache.buckets_for(self.config, tokens=rtp_jax.BLOCKS * self.config.block_size)
        self.parameters, state = rtp_cache.init(self.config, self.buckets)
        self.state: Any = state
        self.reader = Reader(self.config)

    def do(self, code: RtpCode, slot: int = 0, numbers: Sequence[int] = (), **arguments: int) -> tuple[Any, Any]:
        """Performs an operation; its results and ids."""
        operations = RtpBatch().add(code, slot, numbers, **arguments).build(rtp_jax.OPERATIONS, rtp_jax.PAYLOAD)
        new, results = rtp_cache.run(self.parameters, self.state, operations, ids=rtp_jax.IDS)
        self.state, results = jax.device_get((new, results))
        self.state = jax.tree.map(np.array, self.state)
        return results.table[0], results.ids

    def request(self, seq: int, slot: int = 0, keys: Sequence[int] | None = None, batch: int = 1, reserve: int = 0):
        whole = seq // self.config.block_size
        numbers = range(500, 500 + whole) if keys is None else keys[:whole]
        row, _ = self.do(RtpCode.REQUEST, slot, numbers, tokens=seq, sequences=batch, reserve=reserve)
        assert row[RtpColumn.STATUS] == Status.OK

    def malloc(self, slot: int = 0, *, reuse: bool = True, device_cache: bool = True, keep: bool = False):
        """The status, and the tokens that were reused."""
        row, _ = self.do(RtpCode.MALLOC, slot, reuse=int(reuse), device_cache=int(device_cache), keep=int(keep))
        return Status(int(row[RtpColumn.STATUS])), int(row[RtpColumn.VALUE])

    def begin(
        self,
        seq: int,
        slot: int = 0,
        *,
        keys: Sequence[int] | None = None,
        batch: int = 1,
        reserve: int = 0,
        **flags: bool,
    ):
        """A request arrives and asks for blocks."""
        self.request(seq, slot, keys, batch, reserve)
        return self.malloc(slot, **flags)

    def peak(self, remaining: int, slot: int = 0, *, reuse: bool = False, width: int = 0) -> int:
        row, _ = self.do(RtpCode.PEAK, slot, tokens=remaining, reuse=int(reuse), sequences=width)
        return int(row[RtpColumn.VALUE])

    def lists(self, slot: int = 0, row: int = 0) -> list[list[int]]:
        return self.reader.lists(self.state, slot)[row]

    def free(self, pool: int = 0) -> int:
        return len(members_of(self.state.bitmap[pool], self.buckets.levels))

    def has(self, key: int, group: int) -> bool:
        return bool(self.state.items[key, ITEM_WORDS + group])

    # By hand.

    def cache(self, entries: dict[int, Sequence[int]], *, resident: bool = False) -> dict[int, dict[int, int]]:
        """Caches fresh blocks that no request holds: group to keys. Answers group to key to block."""
        placed: dict[int, dict[int, int]] = {}
        for index, keys in entries.items():
            for key in keys:
                block = self._take(index, Role.CACHE)
                self._link(key, resident)
                self.state.items[key, ITEM_WORDS + index] = block
                placed.setdefault(index, {})[key] = block
        return placed

    def place(self, lists: Sequence[Sequence[Sequence[bool]]], slot: int = 0) -> None:
        """Gives a waiting request blocks of its own where True is, and holes elsewhere: of each sequence and group."""
        width = self.buckets.groups + MARK_WORDS
        for sequence, groups in enumerate(lists):
            for index, wanted in enumerate(groups):
                self.state.requests[slot, REQUEST_WORDS + sequence * width + index] = len(wanted)
                for position, real in enumerate(wanted):
                    block = self._take(index, Role.REQUEST) if real else 0
                    self.state.rows[slot, sequence, index, position] = block

    def _take(self, index: int, role: Role) -> int:
        pool = self.config.topology.pool_of(self.config.topology.tags[index])
        block, *left = members_of(self.state.bitmap[pool], self.buckets.levels)
        assert left == list(range(block + 1, block + 1 + len(left))), "nothing was given back yet"
        self.state.bitmap[pool, :-1] = bitmap_of(range(block + 1, block + 1 + len(left)), self.buckets.levels)
        self.state.references[pool, block, role] = 1
        place = COUNTER_WORDS + POOL_WORDS * pool
        self.state.counters[place + PoolCounter.FREE] -= 1
        self.state.counters[place + PoolCounter.HELD] += role != Role.CACHE
        return block

    def _link(self, key: int, resident: bool) -> None:
        items, ring = self.state.items, self.buckets.keys
        if items[key, Item.FLAGS]:
            return
        last = items[ring, Item.PREVIOUS]
        items[last, Item.NEXT] = items[ring, Item.PREVIOUS] = key
        items[key, [Item.NEXT, Item.PREVIOUS]] = ring, last
        items[key, Item.FLAGS] = 1 + 2 * resident


def single(
    num_blocks: int = 10, block_size: int = 4, *, policy: dict[str, Any] | None = None, **fields: Any
) -> Compiled:
    """One full group."""
    return Compiled((group("default", FULL, block_size, **(policy or {})),), num_blocks, **fields)


def alone(kind: Any, num_blocks: int = 10, block_size: int = 4, step: int = 2, **policy: Any) -> Compiled:
    """One group of that type over a pool of its own."""
    return Compiled((group("alone", kind, block_size, **policy),), (num_blocks,), linear_step=step)


def tiny_hybrid(num_blocks: int = 10, *, tail: int = 1, **fields: Any) -> Compiled:
    """A linear and a full group over one pool, blocks of 4 tokens, step 2."""
    groups = (group("linear", LINEAR, 4, active_tail_blocks=tail), group("full1", FULL, 4, kernel=2))
    return Compiled(groups, num_blocks, **{"linear_step": 2, **fields})


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


def test_a_hole_before_a_tail_of_one_block_is_no_error() -> None:
    for tail, blocks in ((1, "..x"), (2, ".xx")):
        window = alone(SWA, active_tail_blocks=tail)
        assert window.begin(12, reuse=False, device_cache=False) == OK
        assert shape(window.lists()[0]) == blocks


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

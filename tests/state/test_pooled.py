"""The id bitmap, the references by role and the items in order of use, against the reference's, without any engine's
rules."""

from __future__ import annotations

import random

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.errors import ConfigError
from hkv.state import item_table, role_counts
from hkv.state.pooled import (
    COUNTER_WORDS,
    ITEM_WORDS,
    POOL_WORDS,
    Counter,
    Item,
    PoolCounter,
    PooledBuckets,
    PooledState,
    Role,
    bitmap_of,
    empty_pooled,
    members_of,
)
from hkv.state.pooled_workspace import ARRAYS
from reference.state.lru import Lru
from tests.rtp_llm.witness.id_bitmap import IdBitmap
from tests.rtp_llm.witness.reference_counts import ReferenceCounts
from tests.state.pooled_program import STEPS, PooledProgram

BUCKETS = PooledBuckets(blocks=1100, groups=2, pools=2, requests=1, sequences=1, row=4, chain=4, keys=6)
POOLS = (1089, 40)
CLAIM, ADD, DROP, TOUCH, FILL, REMOVE = range(6)
NAMES = ("request", "connector", "cache")


def claim(work, present, place, row):
    work, block = role_counts.claim(work, present, row[0])
    return work.write("results", block, place)


def touch(work, present, place, row):
    work, block = item_table.find(work, present, *row[:2])
    return work.write("results", block, place)


def fill(work, present, place, row):
    a, b, c = row
    new = work.read("items", work.item(a, Item.FLAGS)) == 0
    before = [work.read("items", place) for place in item_table.neighbours(work, a)]
    work = item_table.use(work, new, jnp.bool_(False), a, before)
    work = work.write("items", item_table.PRESENT, work.item(a, Item.FLAGS))
    seen = item_table.look(work, a, b, b, c)
    work, filled = item_table.fill(work, present, a, b, b, c, seen)
    return work.write("results", filled, place)


def remove(work, present, place, row):
    a, b, _ = row
    work, count = item_table.remove(work, present, a, jnp.int32(2), lambda group: group, b != 0)
    return work.write("results", count, place)


PROGRAM = PooledProgram(
    BUCKETS,
    {
        CLAIM: claim,
        ADD: lambda work, present, place, row: role_counts.reference(work, present, *row),
        DROP: lambda work, present, place, row: role_counts.release(work, present, *row),
        TOUCH: touch,
        FILL: fill,
        REMOVE: remove,
    },
    (*ARRAYS, "num_ids"),
)


def free_ids(state: PooledState, pool: int) -> list[int]:
    return members_of(np.asarray(state.bitmap)[pool], BUCKETS.levels)


@settings(max_examples=25)
@given(rng=st.randoms(use_true_random=False))
def test_the_smallest_ids_come_first(rng: random.Random) -> None:
    """Most of a pool of three levels is held; random ids are put back, and the smallest taken again."""
    start, state = rng.choice([1, 500, 1030]), empty_pooled(BUCKETS, POOLS)
    bitmap, references = np.array(state.bitmap), np.array(state.references)
    bitmap[0, :-1] = bitmap_of(range(start, POOLS[0]), BUCKETS.levels)
    references[0, 1:start, Role.REQUEST] = 1
    state = state.replace(bitmap=bitmap, references=references)  # type: ignore[arg-type]
    wanted = IdBitmap(POOLS[0], start)
    steps, expected = [], []
    for _ in range(STEPS):
        gone = [id for id in range(1, POOLS[0]) if id not in wanted]
        if gone and rng.random() < 0.5:
            id = rng.choice(gone)
            wanted.add(id)
            steps.append((DROP, 0, id, int(Role.REQUEST)))
            expected.append(0)
        else:
            (id,) = wanted.smallest(1)
            wanted.discard(id)
            steps.append((CLAIM, 0, 0, 0))
            expected.append(id)
    state, answers = PROGRAM.run(state, steps)
    assert answers == expected
    assert free_ids(state, 0) == list(wanted)
    assert np.asarray(state.bitmap)[0, :-1].tolist() == _all_levels(list(wanted))
    assert free_ids(state, 1) == list(range(1, POOLS[1]))


def _all_levels(ids: list[int]) -> list[int]:
    parts = [bitmap_of(range(id, id + 1), BUCKETS.levels) for id in ids]
    return np.bitwise_or.reduce(parts).tolist() if parts else [0] * (BUCKETS.bitmap - 1)


@settings(max_examples=40)
@given(rng=st.randoms(use_true_random=False))
def test_references_are_counted_by_role(rng: random.Random) -> None:
    counts = [ReferenceCounts(size, NAMES) for size in POOLS]
    unheld = [IdBitmap(size, 1) for size in POOLS]
    steps, expected = [], []
    for _ in range(STEPS):
        pool, role = rng.randrange(2), rng.randrange(3)
        held = [id for id in range(1, 12) if id not in unheld[pool]]
        own = [id for id in held if counts[pool].counts[NAMES[role]][id]]
        choice = rng.random()
        if own and choice < 0.5:
            id = rng.choice(own)
            counts[pool].drop(NAMES[role], id)
            if not counts[pool].total(id, NAMES):
                unheld[pool].add(id)
            steps.append((DROP, pool, id, role))
            expected.append(0)
        elif held and choice < 0.75:
            id = rng.choice(held)
            counts[pool].add(NAMES[role], id)
            steps.append((ADD, pool, id, role))
            expected.append(0)
        else:
            (id,) = unheld[pool].smallest(1)
            unheld[pool].discard(id)
            counts[pool].add("request", id)
            steps.append((CLAIM, pool, 0, 0))
            expected.append(id)
    state, answers = PROGRAM.run(empty_pooled(BUCKETS, POOLS), steps)
    assert answers == expected
    for pool, size in enumerate(POOLS):
        assert free_ids(state, pool) == list(unheld[pool])
        place = COUNTER_WORDS + POOL_WORDS * pool
        assert state.counters[place + PoolCounter.FREE] == len(unheld[pool])
        assert state.counters[place + PoolCounter.HELD] == counts[pool].busy(("request", "connector"))
        for role, name in enumerate(NAMES):
            assert np.asarray(state.references)[pool, :size, role].tolist() == counts[pool].counts[name]


@settings(max_examples=40)
@given(rng=st.randoms(use_true_random=False))
def test_items_are_kept_in_order_of_use(rng: random.Random) -> None:
    lru: Lru[int, list[int]] = Lru()
    cache = [dict.fromkeys(range(1, 9), 0) for _ in POOLS]
    steps = [(CLAIM, pool, 0, 0) for pool in range(2) for _ in range(8)]
    expected: list[int] = [block for _ in range(2) for block in range(1, 9)]
    while len(steps) < STEPS:
        key, group = rng.randrange(BUCKETS.keys), rng.randrange(2)
        choice = rng.random()
        if choice < 0.4:
            found = lru.get(key)
            steps.append((TOUCH, key, group, 0))
            expected.append(0 if found is None else found[group])
        elif choice < 0.8:
            block, known = rng.randint(1, 8), key in lru
            blocks = lru.peek(key) or [0, 0]
            filled = blocks[group] == 0
            if filled:
                blocks[group] = block
                cache[group][block] += 1
            if not known:
                lru.put(key, blocks)
            steps.append((FILL, key, group, block))
            expected.append(int(filled))
        elif key in lru:
            keep = rng.random() < 0.5
            blocks = lru.remove(key)
            for index, block in enumerate(blocks):
                if block and not keep:
                    cache[index][block] -= 1
            steps.append((REMOVE, key, int(keep), 0))
            expected.append(sum(block > 0 for block in blocks))
    state, answers = PROGRAM.run(empty_pooled(BUCKETS, POOLS), steps)
    items = np.asarray(state.items)
    assert answers == expected
    assert order(items) == [(key, lru.peek(key)) for key in lru]
    assert order(items, backward=True) == order(items)[::-1]
    for pool in range(2):
        assert np.asarray(state.references)[pool, 1:9, Role.CACHE].tolist() == list(cache[pool].values())
    removed = [answer for (code, *_), answer in zip(steps, answers, strict=True) if code == REMOVE]
    assert state.counters[Counter.EVICTIONS] == sum(removed)


def order(items: np.ndarray, backward: bool = False) -> list[tuple[int, list[int]]]:
    """Keys and blocks along the ring."""
    key, found = BUCKETS.keys, []
    while (key := int(items[key, Item.PREVIOUS if backward else Item.NEXT])) != BUCKETS.keys:
        assert len(found) < BUCKETS.keys, "the ring does not come back to its head"
        found.append((key, items[key, ITEM_WORDS:].tolist()))
    return found


def test_a_million_blocks_have_four_levels() -> None:
    def levels(blocks: int) -> int:
        return len(PooledBuckets(blocks, 1, 1, 1, 1, 1, 1, 1).levels)

    assert [levels(32), levels(1024), levels(1025), levels(32768), levels(1 << 20)] == [1, 2, 3, 3, 4]


@pytest.mark.parametrize("num_blocks", [(1101,), (0,), (5, 5, 5)])
def test_pools_that_do_not_fit_are_refused(num_blocks: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="num_blocks"):
        empty_pooled(BUCKETS, num_blocks)

"""The id bitmap, the references by role and the items in order of use, beside the reference's, without any engine's
rules."""

from __future__ import annotations

import functools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.errors import ConfigError
from hkv.state import item_table, recency, role_counts
from hkv.state.loops import loop, peek, read, when
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
from hkv.state.pooled_workspace import ARRAYS, PooledSizes, PooledWorkspace
from reference.state.id_bitmap import IdBitmap
from reference.state.lru import Lru
from reference.state.reference_counts import ReferenceCounts

BUCKETS = PooledBuckets(blocks=1100, groups=2, pools=2, requests=1, sequences=1, row=4, chain=4, keys=6)
POOLS = (1089, 40)
WRITES = (*ARRAYS, "num_ids")
CLAIM, ADD, DROP, TOUCH, FILL, REMOVE = range(6)
NAMES = ("request", "connector", "cache")
STEPS = 64


@functools.cache
def program() -> Any:
    """Performs rows of `(code, a, b, c)` on a state, in order; returns what each answered, too."""

    def perform(state: PooledState, table: jax.Array) -> tuple[PooledState, jax.Array]:
        arrays = {name: getattr(state, name).reshape(-1) for name in ARRAYS}
        zero = jnp.int32(0)
        fields: dict[str, Any] = {"ids": zero, "lane": zero, "num_ids": zero}
        answers = jnp.zeros(STEPS + 1, jnp.int32)
        work = PooledWorkspace(PooledSizes(BUCKETS, 1, STEPS, 1, 0), **arrays, **fields, results=answers)

        def body(w: PooledWorkspace, local):
            (place,) = local
            code, a, b, c = (read(table, place * 4 + column) for column in range(4))

            def claim(v):
                v, block = role_counts.claim(v, code == CLAIM, a)
                return v.write("results", block, place)

            def touch(v):
                v, block = item_table.find(v, code == TOUCH, a, b)
                return v.write("results", block, place)

            def fill(v):
                new = v.read("items", v.item(a, Item.FLAGS)) == 0
                v = recency.use(v, new, jnp.bool_(False), a, recency.look(v, a))
                v = v.write("items", item_table.PRESENT, v.item(a, Item.FLAGS))
                v, seen = peek(
                    code == FILL, lambda u: item_table.look(u, a, b, b, c), v, ("items", "references"), (1, 0)
                )
                v, filled = item_table.fill(v, code == FILL, a, b, b, c, seen)
                return v.write("results", filled, place)

            def remove(v):
                v, count = item_table.remove(v, code == REMOVE, a, jnp.int32(2), lambda group: group, b != 0)
                return v.write("results", count, place)

            for number, step in (
                (CLAIM, claim),
                (ADD, lambda v: role_counts.reference(v, code == ADD, a, b, c)),
                (DROP, lambda v: role_counts.release(v, code == DROP, a, b, c)),
                (TOUCH, touch),
                (FILL, fill),
                (REMOVE, remove),
            ):
                w = when(code == number, step, w, writes=(*WRITES, "results"))
            return w, (place + 1,)

        work, _ = loop(lambda c: c[0] < table.shape[0] // 4, body, work, (0,), writes=(*WRITES, "results"))
        new = PooledState(**{name: getattr(work, name).reshape(getattr(state, name).shape) for name in ARRAYS})
        return new, work.results

    return jax.jit(perform)


def run(state: PooledState, steps: list[tuple[int, int, int, int]]) -> tuple[PooledState, list[int]]:
    table = np.full((STEPS, 4), -1, np.int32)
    table[: len(steps)] = steps
    state, answers = jax.device_get(program()(state, table.reshape(-1)))
    return state, answers[: len(steps)].tolist()


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
    state, answers = run(state, steps)
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
    state, answers = run(empty_pooled(BUCKETS, POOLS), steps)
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
    state, answers = run(empty_pooled(BUCKETS, POOLS), steps)
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
        found.append((key, items[key, ITEM_WORDS:].tolist()))
    return found


def test_a_million_blocks_have_four_levels() -> None:
    def levels(blocks: int) -> int:
        return len(PooledBuckets(blocks, 1, 1, 1, 1, 1, 1, 1).levels)

    assert [levels(32), levels(1024), levels(1025), levels(32768), levels(1 << 20)] == [1, 2, 3, 3, 4]


@pytest.mark.parametrize(
    ("field", "value"), [("blocks", 0), ("row", 1 << 30), ("keys", 1 << 28), ("pools", 3), ("groups", 33)]
)
def test_impossible_sizes_are_refused(field: str, value: int) -> None:
    sizes = {"blocks": 8, "groups": 2, "pools": 1, "requests": 1, "sequences": 1, "row": 1, "chain": 1, "keys": 1}
    with pytest.raises(ConfigError):
        PooledBuckets(**{**sizes, field: value})


@pytest.mark.parametrize("num_blocks", [(1101,), (0,), (5, 5, 5)])
def test_pools_that_do_not_fit_are_refused(num_blocks: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="num_blocks"):
        empty_pooled(BUCKETS, num_blocks)

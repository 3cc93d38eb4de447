"""The free queue and the key table by themselves, beside the reference's pool, without any engine's rules."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.state import free_queue, key_table
from hkv.state.loops import loop, read, when
from hkv.state.state import EVICTED, NOT_RETAINED, RETIRED, Buckets, Counter, State, empty
from hkv.state.workspace import ARRAYS, COUNTERS, OUTPUTS, Sizes, Workspace
from reference.state.history import NOT_RETAINED as PLAIN_NOT_RETAINED
from reference.state.history import RETIRED as PLAIN_RETIRED
from reference.state.pool import NULL, Pool

BUCKETS = Buckets(blocks=24, requests=1, groups=4, row=8, chain=1, keys=8, parts=2)
BLOCKS = 20
WRITES = (*ARRAYS, *COUNTERS)
TAKE, ADOPT, RELEASE, ADD, DROP, MOVE, NOTE, PUT = range(8)


@functools.cache
def program() -> Any:
    """Performs rows of `(code, a, b, c)` on a state, in order."""

    def perform(state: State, table: jax.Array) -> State:
        arrays = {name: getattr(state, name).reshape(-1) for name in ARRAYS}
        counters = {name: state.counters[place] for name, place in COUNTERS.items()}
        zero = jnp.int32(0)
        outputs = dict.fromkeys((*OUTPUTS, "lane", "num_ids", "num_events", "num_copies"), zero)
        work = Workspace(Sizes(BUCKETS, 1, 1, 1, 0, 0), **arrays, **counters, **outputs)

        def body(w: Workspace, local):
            (place,) = local
            code, a, b, c = (read(table, place * 4 + column) for column in range(4))
            w = free_queue.make_room(w)
            start = w.row(zero, zero) + a
            for number, step in (
                (TAKE, lambda v: free_queue.take(v, start, b)),
                (ADOPT, lambda v: free_queue.adopt(v, start, b)),
                (RELEASE, lambda v: free_queue.release(v, start, b)),
                (ADD, lambda v: key_table.add_key(v, code == ADD, a, b, c)),
                (DROP, lambda v: key_table.drop_keys(v, code == DROP, a)),
                (MOVE, lambda v: key_table.move_keys(v, code == MOVE, a, b)),
                (NOTE, lambda v: key_table.note_absence(v, code == NOTE, a, b)),
                (PUT, lambda v: v.write("rows", b, start)),
            ):
                w = when(code == number, step, w, writes=WRITES)
            return w, (place + 1,)

        work, _ = loop(lambda c: c[0] < table.shape[0] // 4, body, work, (0,), writes=WRITES)
        line = state.counters
        for name, place in COUNTERS.items():
            line = line.at[place].set(getattr(work, name))
        return State(
            **{name: getattr(work, name).reshape(getattr(state, name).shape) for name in ARRAYS}, counters=line
        )

    return jax.jit(perform)


class Both:
    """A compiled pool and a plain one, to which the same things happen. Entries 0 to 7 of one row hold blocks."""

    def __init__(self) -> None:
        self.state = empty(BUCKETS, BLOCKS)
        self.pool = Pool(BLOCKS)
        self.row = [NULL] * 8
        self.parts: dict[int, dict[int, int]] = {}

    def do(self, *rows: tuple[int, int, int, int]) -> None:
        padded = [*rows, *[(9, 0, 0, 0)] * (8 - len(rows))]
        self.state = program()(self.state, np.array(padded, np.int32).reshape(-1))

    def take(self, start: int, count: int) -> None:
        self.row[start : start + count] = self.pool.take(count)
        self.do((TAKE, start, count, 0))
        for block in self.row[start : start + count]:
            self.parts.pop(block, None)

    def adopt(self, start: int, count: int) -> None:
        self.pool.touch(self.row[start : start + count])
        self.do((ADOPT, start, count, 0))

    def hit(self, start: int, blocks: Sequence[int]) -> None:
        """A request finds blocks: they become entries of the row, and get a reference each."""
        self.row[start : start + len(blocks)] = blocks
        self.do(*((PUT, start + place, block, 0) for place, block in enumerate(blocks)))
        self.adopt(start, len(blocks))

    def release(self, start: int, count: int) -> None:
        self.pool.release(reversed(self.row[start : start + count]))
        self.do((RELEASE, start, count, 0))

    def add(self, block: int, part: int, key: int) -> None:
        entry = key * BUCKETS.groups + 1
        self.pool.insert((1, key), block, 3 if part == 0 else part)
        self.parts.setdefault(block, {})[part] = key
        self.do((ADD, block, part, entry))

    def drop(self, block: int) -> None:
        self.pool.drop_keys(block)
        self.parts.pop(block, None)
        self.do((DROP, block, 0, 0))

    def move(self, source: int, target: int) -> None:
        self.parts[target] = self.parts.pop(source, {})
        self.pool.move_keys(source, target)
        self.do((MOVE, source, target, 0))

    def note(self, key: int, reason: int) -> None:
        plain = {RETIRED: PLAIN_RETIRED, NOT_RETAINED: PLAIN_NOT_RETAINED}[reason]
        self.pool.history.note(1, key, plain)
        self.do((NOTE, key * BUCKETS.groups + 1, reason, 0))

    def check(self) -> None:
        counters, ring = np.asarray(self.state.counters), BUCKETS.queue
        places = np.arange(counters[Counter.HEAD], counters[Counter.TAIL]) % ring
        queue = np.asarray(self.state.queue)[places]
        blocks = np.asarray(self.state.blocks)
        assert queue[queue > 0].tolist() == list(self.pool.free)
        assert counters[Counter.FREE] == len(self.pool.free)
        assert counters[Counter.EVICTIONS] == self.pool.evictions
        assert np.maximum(-blocks[:BLOCKS], 0).tolist() == self.pool.refs
        for place, block in zip(places[queue > 0], queue[queue > 0], strict=True):
            assert blocks[block] == place + 1
        assert np.asarray(self.state.rows)[0, 0].tolist() == self.row
        table = np.asarray(self.state.table)
        for key in range(BUCKETS.keys):
            value = int(table[key, 1])
            first = self.pool.table.first((1, key))
            assert (value >> 3 if value > 0 else None) == first
            if value <= 0:
                noted = self.pool.history.of(1, key)
                reasons = {None: 0, 0: 0, 1: EVICTED, PLAIN_RETIRED: RETIRED, PLAIN_NOT_RETAINED: NOT_RETAINED}
                assert max(value, -4) in ((EVICTED, -4) if noted == 1 else (reasons[noted],))
        words = np.asarray(self.state.keys)[:BLOCKS]
        assert (words[:, 0] != 0).tolist() == [key is not None for key in self.pool.primary]
        for block in range(1, BLOCKS):
            whole = {0: words[block, 0] >> 2} if words[block, 0] >> 2 else {}
            inside = {part: words[block, part] for part in (1, 2) if words[block, part]}
            found = {part: (int(word) - 1) // BUCKETS.groups for part, word in {**whole, **inside}.items()}
            assert found == self.parts.get(block, {})


@settings(max_examples=60)
@given(st.data())
def test_both_pools_agree(data: st.DataObject) -> None:
    both = Both()
    in_use: list[tuple[int, int]] = []
    for _ in range(data.draw(st.integers(1, 14))):
        action = data.draw(st.sampled_from(("take", "free", "share", "key", "drop", "note")))
        named = [block for block in range(1, BLOCKS) if not both.parts.get(block)]
        if action == "take" and not in_use:
            count = data.draw(st.integers(0, 8))
            both.take(0, count)
            in_use.append((0, count))
        elif action == "share" and in_use and len(in_use) < 3:
            both.adopt(*in_use[0])
            in_use.append(in_use[0])
        elif action == "free" and in_use:
            both.release(*in_use.pop())
        elif action == "key" and named:
            block = data.draw(st.sampled_from(named))
            both.add(block, 0, data.draw(st.integers(0, 3)))
        elif action == "drop":
            both.drop(data.draw(st.integers(1, BLOCKS - 1)))
        elif action == "note":
            both.note(data.draw(st.integers(0, 5)), data.draw(st.sampled_from((RETIRED, NOT_RETAINED))))
        both.check()


@pytest.mark.parametrize("seed", range(12))
def test_blocks_live_and_die_in_both_pools_alike(seed: int) -> None:
    blocks_live(seed)


def blocks_live(seed: int) -> None:
    """Two requests come and go beside each other, and find free and held blocks by keys that may end inside them."""
    rng, both = random.Random(seed), Both()
    held: dict[int, int] = {}
    for _ in range(60):
        start = rng.choice((0, 4))
        known = [block for block, keys in both.parts.items() if keys]
        action = rng.choice(("take", "hit", "hit", "free", "key", "key", "key", "drop", "move", "note"))
        if action == "take" and start not in held:
            held[start] = min(rng.randint(1, 4), len(both.pool.free))
            both.take(start, held[start])
        elif action == "hit" and start not in held and known:
            blocks = rng.sample(known, min(len(known), rng.randint(1, 4)))
            held[start] = len(blocks)
            both.hit(start, blocks)
        elif action == "free" and start in held:
            both.release(start, held.pop(start))
        elif action == "key":
            block, key = rng.randrange(1, BLOCKS), rng.randrange(BUCKETS.keys)
            part = (key + 1) % 3
            if part not in both.parts.get(block, {}):
                both.add(block, part, key)
        elif action == "drop" and rng.random() < 0.3:
            both.drop(rng.randrange(1, BLOCKS))
        elif action == "move" and known:
            unknown = [block for block in range(1, BLOCKS) if not both.parts.get(block)]
            both.move(rng.choice(known), rng.choice(unknown)) if unknown else None
        elif action == "note":
            both.note(rng.randrange(BUCKETS.keys), rng.choice((RETIRED, NOT_RETAINED)))
        both.check()


def many_lives() -> None:
    """Seeds by which planted defects are judged (`tests/mutants`)."""
    for seed in range(40):
        blocks_live(seed)


def test_the_ring_is_squeezed_when_it_is_full() -> None:
    """The same blocks are found and given back, past others that nobody takes: the ring fills with empty places."""
    both = Both()
    blocks = list(range(3, 10))
    for key, block in enumerate(blocks):
        both.add(block, 0, key)
    tails = []
    for _ in range(BUCKETS.queue // len(blocks)):
        both.hit(0, blocks)
        both.release(0, len(blocks))
        both.check()
        tails.append(int(np.asarray(both.state.counters)[Counter.TAIL]))
    assert any(later < tail for tail, later in itertools.pairwise(tails)), "the tail came nowhere near the head"
    both.take(0, 8)
    both.check()


def test_the_ring_is_squeezed_once_it_has_come_round() -> None:
    """The head has passed the ring's end by then: positions are no places any more."""
    both = Both()
    for _ in range(BUCKETS.queue // 7 + 1):
        both.take(0, 7)
        for key, block in enumerate(both.row[:7]):
            both.add(block, 0, key)  # so that it goes to the tail
        both.release(0, 7)
    head, tail = np.asarray(both.state.counters)[[Counter.HEAD, Counter.TAIL]]
    assert head > BUCKETS.queue
    blocks = both.row[:7]
    for _ in range(BUCKETS.queue // len(blocks)):
        both.hit(0, blocks)
        both.release(0, len(blocks))
        both.check()
    assert int(np.asarray(both.state.counters)[Counter.TAIL]) - tail < BUCKETS.queue

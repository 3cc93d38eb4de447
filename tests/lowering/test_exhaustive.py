"""A small cache exhaustively: every state that operations can reach, every operation, plainly and in lanes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from reference.language import Layout
from tests.lowering import harness

SOURCE = """
from __future__ import annotations
from reference.language import *
TEXT = Text(__name__, SOURCE)
class Item(Record):
    rank: int
    inside: int
class Least(Heap[Item]):
    def before(self, one: Item, other: Item) -> bool:
        return one.rank < other.rank
class Cache(Part):
    items: Table[Item]
    free: FreeList
    heap: Least
    recent: Ring[Item]
    answer: int
def perform(c: Cache, code: int, which: int, number: int):
    item = c.items[which]
    c.answer = 0
    if code == 0:
        if item.inside:
            c.answer = 1
            return
        if c.free.count == 0:
            c.answer = 2
            return
        item.rank, item.inside = number, c.free.take()
        c.heap.add(item)
        c.recent.put(item)
    elif code == 1:
        if c.heap.count == 0:
            c.answer = 3
            return
        first = c.heap.first() if number == 0 else c.recent.oldest()
        c.heap.remove(first)
        c.recent.remove(first)
        c.free.put(c.free.reserve(1, number == 0), first.inside)
        first.inside = 0
    elif item.inside:
        item.rank = number
        c.heap.settle(item, c.heap.place[item])
        c.recent.remove(item)
        c.recent.put(item)
"""
ITEMS, MASK = 2, 1
MOST = 4000


def successors(text, layout, states):
    """States after each operation, plainly."""
    found = []
    for state in states:
        for operation in OPERATIONS:
            cache = layout.restored(state)
            text.perform(cache, *operation)
            found.append(layout.numbers_of(cache))
    return found


OPERATIONS = [(code, which, number) for code in range(3) for which in range(1, ITEMS + 1) for number in range(2)]


def key(layout, state):
    """A state, but for None, spare elements, and what the ring and heap left where nothing is."""
    return tuple(
        (name, tuple(harness.told(layout, {n: np.array(v) for n, v in state.items()}, name).reshape(-1).tolist()))
        for name in state
    )


def test_all_states_and_operations():
    text = harness.module_of(SOURCE)
    layout = Layout(text.Cache)
    cache = layout.make({"items": ITEMS + 1, "free.free": MASK + 1, "heap.items": ITEMS + 2})
    cache.free.free[:2], cache.free.count, cache.free.mask = [1, 2], 2, MASK
    ends = cache.recent.ends = cache.items[ITEMS + 1]
    cache.recent.newer[ends] = cache.recent.older[ends] = ends
    first = layout.numbers_of(cache)
    seen, edge = {key(layout, first): first}, [first]
    pairs = []
    while edge and len(seen) < MOST:
        reached = successors(text, layout, edge)
        starts = [state for state in edge for _ in OPERATIONS]
        pairs += zip(starts, OPERATIONS * len(edge), reached, strict=True)
        edge = []
        for state in reached:
            state["free.front"] %= MASK + 1  # the ring's numbers go on, its places do not
            name = key(layout, state)
            if name not in seen:
                seen[name] = state
                edge.append(state)
    assert not edge, len(seen)
    starts, operations, wanted = zip(*pairs, strict=True)
    lanes = {name: jnp.asarray(np.array([s[name] for s in starts], np.int32)) for name in first}
    numbers = [jnp.asarray(np.array(column, np.int32)) for column in zip(*operations, strict=True)]
    program = harness.compiled(layout, text.perform, lanes, *numbers, lanes=True)
    got = {name: np.array(each) for name, each in program(lanes, *numbers).items()}
    got["free.front"] %= MASK + 1
    want = {name: np.array([s[name] for s in wanted], np.int32) for name in first}
    assert not harness.differing(layout, got, want)
    assert len(seen) > 100, len(seen)

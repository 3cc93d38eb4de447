"""Runs that go around every ring: where each place is a live one, a refused write must not hit any."""

from __future__ import annotations

import random

import jax.numpy as jnp
import pytest

from reference.language import Layout
from tests.lowering import harness

SOURCE = """
from __future__ import annotations
from reference.language import *
TEXT = Text(__name__, SOURCE)
class Op(Record):
    code: int
    count: int
    id: int
class Pool(FreeList):
    pass
class Cache(Part):
    ops: Table[Op]
    small: Pool
    large: FreeList
    taken: Array[int]
    held: int
    sum: int
def perform(c: Cache, op: Op) -> None:
    if op.code < 2:
        for k in range(op.count):
            if c.small.count == 0 or c.held > 200:
                return
            found = c.small.take()
            c.taken[c.held] = found
            c.held += 1
            c.sum = (c.sum * 3 + found) % 100003
    elif op.code == 2 or op.code == 3:
        count = min(op.count, c.held)
        if count == 0:
            return
        place = c.small.reserve(count, op.code == 2)
        for k in range(count):
            c.held -= 1
            c.small.put(place + k, c.taken[c.held])
    elif c.large.count > 0:
        found = c.large.take()
        c.large.put(c.large.reserve(1, op.id % 2), found)
        c.sum = (c.sum + found * op.id) % 100003
def perform_all(c: Cache, count: int):
    for n in range(1, count + 1):
        perform(c, c.ops[n])
"""
OPERATIONS = 4000


@pytest.mark.parametrize("seed", range(3))
def test_rings_all_of_whose_places_are_live(seed):
    text = harness.module_of(SOURCE)
    layout, draw = Layout(text.Cache), random.Random(seed)
    sizes = {"ops": OPERATIONS, "small.free": 128, "large.free": 256, "taken": 400}
    cache = layout.make(sizes)
    for pool, size in ((cache.small, 128), (cache.large, 256)):
        pool.free[:], pool.count, pool.mask = range(1, size + 1), size, size - 1
    for op in cache.ops[1:]:
        op.code, op.count, op.id = draw.randrange(5), draw.randrange(9), draw.randrange(100)
    start = layout.arrays_of(cache)
    program = harness.compiled(layout, text.perform_all, start, OPERATIONS)
    text.perform_all(cache, OPERATIONS)
    got, want = program(harness.device(start, {}), jnp.int32(OPERATIONS)), layout.arrays_of(cache)
    assert not harness.differing(layout, got, want)
    assert abs(want["large.front"]) > 5 or abs(want["small.front"]) > 256
    assert not harness.copies(program)

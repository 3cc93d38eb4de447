"""A small cache for texts of a few lines, whose arrays are large enough that a copy is seen."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from reference.language import Layout
from tests.lowering import harness

HEAD = """
from __future__ import annotations
import enum
from reference.language import *
TEXT = Text(__name__, SOURCE)
class Item(Record):
    rank: int
    other: Item
    line: Line[int]
class Thing(Record):
    rank: int
class Config(Settings):
    few: int
class Side(Part):
    count: int
    numbers: Array[int]
class Cache(Part):
    items: Table[Item]
    things: Table[Thing]
    numbers: Array[int]
    left: Side
    right: Side
    place: Column[Item, int]
    config: Config
    x: int
    y: int
    top: Item
class Kind(enum.IntEnum):
    ONE, TWO = 1, 2
"""
LINES = HEAD.count("\n")
SIZES = {"items": 120, "things": 120, "numbers": 120, "left.numbers": 120, "right.numbers": 120, "items.line": 2}


def text(rules: str) -> Any:
    """A module of rules over the small cache; its first line is `LINES + 1`."""
    return harness.module_of(HEAD + rules)


def run(rules: str, *numbers: int, static: Any = None) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Arrays that `rule(c, *numbers)` leaves, plainly and lowered, and the program; copies are not allowed."""
    module = text(rules)
    layout = Layout(module.Cache)
    cache = layout.make(SIZES)
    for n, item in enumerate(cache.items[1:]):
        item.rank, item.other, item.line[:] = n % 7, cache.items[1 + (n * 5) % 120], [n, n + 1]
    cache.numbers[:] = [(n * 3) % 11 for n in range(120)]
    cache.left.numbers[:] = range(120)
    cache.x, cache.y, cache.config.few, cache.top = 5, 3, 2, cache.items[9]
    start, fixed = layout.arrays_of(cache), static or {}
    program = harness.compiled(layout, module.rule, start, *numbers, static=fixed)
    module.rule(cache, *numbers)
    got = program(harness.device(start, fixed), *(jnp.int32(n) for n in numbers))
    want = layout.arrays_of(cache)
    differing = harness.differing(layout, got, want)
    assert not differing, {n: (np.asarray(got[n]), want[n]) for n in differing}
    assert not harness.copies(program)
    return want, got, program

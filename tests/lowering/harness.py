"""Texts of tests, run plainly and lowered: what differs, and what the compiled program is made of."""

from __future__ import annotations

import itertools
import random
import re
import sys
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hkv.lowering import lowered, over_lanes
from reference.language import Layout

_serial = itertools.count()


def module_of(source: str) -> types.ModuleType:
    """A module of a source, which is its `SOURCE`."""
    name = f"text_of_a_test_{next(_serial)}"
    module = types.ModuleType(name)
    module.__file__ = f"{name}.py"
    module.__dict__["SOURCE"] = source
    sys.modules[name] = module
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    return module


def device(arrays: Mapping[str, Any], static: Mapping[str, int]) -> dict[str, Any]:
    return {name: jnp.asarray(each) for name, each in arrays.items() if name not in static}


def compiled(layout: Layout, rule: Any, arrays: Any, *numbers: Any, static: Any = None, known: Any = (), lanes=False):
    """A lowered rule, compiled for arrays of such shapes."""
    how = over_lanes if lanes else lowered
    program = jax.jit(how(layout, rule, static, known), donate_argnums=0)
    traced = program.trace(device(arrays, static or {}), *numbers)
    assert len(traced.jaxpr.in_avals) == len(arrays) - len(static or {}) + len(numbers)  # or a tracer leaked
    assert not traced.jaxpr.consts
    return traced.lower().compile()


def copies(program: Any) -> list[str]:
    """Copies of arrays of at least 100 elements."""
    return re.findall(r"= s32\[[0-9,]{3,}\][^ ]* copy\(.*", program.as_text())


def counts(program: Any) -> dict[str, int]:
    text = program.as_text()
    return {
        "loops": text.count(" while("),
        "segments": text.count(" conditional("),
        "lines": text.count("\n"),
        "copies": len(copies(program)),
    }


def differing(layout: Layout, got: Mapping[str, Any], want: Mapping[str, Any]) -> list[str]:
    """Names of arrays and scalars that are not equal, but for None and spare elements."""
    return [name for name in got if not np.array_equal(told(layout, got, name), told(layout, want, name))]


def told(layout: Layout, arrays: Mapping[str, Any], name: str) -> np.ndarray:
    """An array without None and spare elements."""
    values = np.asarray(arrays[name])
    flat = layout.arrays.get(name)
    if flat is None:
        return values
    if not flat.table:
        return values[..., :-1]
    first = next(f.name for f in layout.arrays.values() if f.table == flat.table and not f.line)
    return values[..., values.shape[-1] // np.asarray(arrays[first]).shape[-1] :]


def filled(text: Any, layout: Layout, operations: int, seed: int) -> Any:
    """A cache of a random text with random numbers, and random operations."""
    from tests.lowering.random_texts import FREE, PLACES, RECORDS, WIDTH

    draw = random.Random(seed)
    sizes = {"items": RECORDS, "things": RECORDS, "ops": operations, "numbers": PLACES, "places": PLACES}
    sizes |= {"items.line": WIDTH, "items.near": WIDTH, "free.free": FREE, "heap.items": RECORDS + 2}
    cache = layout.make(sizes)
    some = [None, *cache.items[1:]]
    for item in cache.items[1:]:
        item.rank, item.mark, item.other = draw.randrange(1024), draw.randrange(1024), draw.choice(some)
        item.line[:] = [draw.randrange(1024) for _ in range(WIDTH)]
        item.near[:] = [draw.choice(some) for _ in range(WIDTH)]
        cache.count[item], cache.friend[item] = draw.randrange(1024), draw.choice(some)
    cache.numbers[:] = [draw.randrange(1024) for _ in range(PLACES)]
    cache.places[:] = [draw.choice(some) for _ in range(PLACES)]
    cache.x, cache.y, cache.top = draw.randrange(1024), draw.randrange(1024), draw.choice(some)
    cache.config.few, cache.config.many = draw.randrange(3), draw.randrange(1024)
    cache.free.mask, cache.free.count = FREE - 1, 60
    cache.free.free[:60] = range(1, 61)
    ends = cache.ring.ends = cache.items[RECORDS]
    cache.ring.newer[ends] = cache.ring.older[ends] = ends
    cache.listed[ends] = 1
    for op in cache.ops[1:]:
        op.code, op.a, op.b = draw.randrange(1024), draw.randrange(RECORDS - 1), draw.randrange(1024)
    return cache


def check_random_text(source: str, *, static: bool) -> int:
    """Runs a random text plainly and lowered, over random states; the copies of its program."""
    text = module_of(source)
    layout, count = Layout(text.Cache), 40
    caches = [filled(text, layout, count, seed) for seed in range(2)]
    starts = [layout.arrays_of(cache) for cache in caches]
    fixed = {name: int(starts[0][name]) for name in layout.settings} if static else {}
    program = compiled(layout, text.perform_all, starts[0], count, static=fixed)
    for cache, start in zip(caches, starts, strict=True):
        if static and cache is not caches[0]:
            break
        text.perform_all(cache, count)
        got = program(device(start, fixed), jnp.int32(count))
        assert not differing(layout, got, layout.arrays_of(cache)), source
    return len(copies(program))

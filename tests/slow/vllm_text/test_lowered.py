"""VLLM's text lowered to JAX, held to the same text run plainly: all arrays, answers and what is told among them."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import numpy as np
import pytest

from hkv.contract import registry
from hkv.dialects.vllm.config import NAME
from hkv.dialects.vllm.plain import LAYOUT
from hkv.lowering import lowered
from hkv.oracle.record import Only, draw
from reference.dialects.vllm.operations import perform_all
from tests.vllm_text.batches import ROOM, Noted, differing

DIALECT = registry.dialect_of(NAME)

MOST = {"core": (80, 66), "eagle": (80, 66), "partial": (112, 92), "speculative_state": (95, 76)}
"""Most loops, and conditional segments, of programs of one configuration: call sites make compile time."""


def noted(feature: str, seed: int, version: int, steps: int, only: Only = Only()) -> Noted:  # noqa: B008
    header, choices = draw(feature, seed, version, only)
    engine = Noted(header)
    DIALECT.drive(header, choices, lambda operation: DIALECT.perform(engine, operation), steps)
    return engine


@functools.cache
def _program() -> Any:
    """One program for all configurations."""
    return jax.jit(lowered(LAYOUT, perform_all), donate_argnums=0)


def performed_alike(engine: Noted) -> None:
    cache = engine.batch(ROOM)
    arrays, count = LAYOUT.arrays_of(cache), len(engine.noted)
    perform_all(cache, count)
    assert cache.told < ROOM["news"]
    assert cache.listed < ROOM["ids"]
    got = jax.device_get(_program()(jax.device_put(arrays), np.int32(count)))
    assert differing(got, LAYOUT.arrays_of(cache)) == []
    assert cache.evictions == engine.evictions


@pytest.mark.parametrize("feature", sorted({*DIALECT.features(NAME)} - {"long_rows"}))
def test_lowered_it_does_what_it_does_plainly(feature: str) -> None:
    for seed in range(16):
        performed_alike(noted(feature, seed, 1 + seed % 4, 8))


@pytest.mark.parametrize("kind", ["chunk_pair", "sink_window", "chunked_local", "cross_attention", "opaque"])
def test_every_kind_is_lowered(kind: str) -> None:
    for seed in range(6):
        performed_alike(noted("core", seed, 3, 8, Only(frozenset({kind, "full_attention"}))))


@pytest.mark.parametrize("feature", sorted(MOST))
def test_no_array_is_copied(feature: str) -> None:
    """With the configuration known, so that the program is pruned."""
    engine = noted(feature, 3, 2, 40)
    static, count = engine.static(), len(engine.noted)
    cache = engine.batch({})
    arrays = {name: array for name, array in LAYOUT.arrays_of(cache).items() if name not in static}
    compiled = jax.jit(lowered(LAYOUT, perform_all, static), donate_argnums=0).lower(arrays, count).compile()
    perform_all(cache, count)
    got = jax.device_get(compiled(jax.device_put(arrays), np.int32(count)))
    assert differing(got, LAYOUT.arrays_of(cache)) == []
    program = compiled.as_text()
    assert not re.findall(r"= s32\[\d{2,}\]\S* copy\(", program)
    loops, segments = MOST[feature]
    assert (program.count(" while(") <= loops) & (program.count(" conditional(") <= segments)

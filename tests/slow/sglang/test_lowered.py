"""SGLang's text lowered to JAX, held to the same text run plainly: answers, states, and all arrays."""

from __future__ import annotations

import functools
import re
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import pytest

from hkv.contract import registry
from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.engines.numpy import SGLangNumpyEngine
from hkv.dialects.sglang.plain import LAYOUT
from hkv.dialects.sglang.traffic import FEATURES
from hkv.lowering import lowered
from hkv.oracle.record import Only, differ, draw
from reference.dialects.sglang.operations import perform_all, perform_at
from reference.dialects.sglang.records import Code
from tests.sglang.batches import Noted, differing

ONLY = Only(dialect=structs.NAME)

LOOPS, SEGMENTS = 140, 150
"""Most loops, and conditional segments, of the program of full attention and a window: call sites make compile time."""


class Lowered(SGLangNumpyEngine):
    """The lowered text, an operation a dispatch; the configuration is data, so that one program serves all."""

    room = MappingProxyType({"keys": 1023, "requests": 15, "row": 256, "payload": 256, "room": 63})

    def _perform(self, code: Code) -> None:
        arrays = LAYOUT.arrays_of(self.cache)
        del arrays["config.alone"]
        LAYOUT.load(self.cache, jax.device_get(_program()(arrays, 1, int(code))))


@functools.cache
def _program() -> Any:
    return jax.jit(lowered(LAYOUT, perform_at, {"config.alone": 0}), donate_argnums=0)


@pytest.mark.parametrize("feature", FEATURES)
def test_lowered_it_answers_as_it_does_plainly(feature: str) -> None:
    for seed in range(12):
        recording, parted = differ(Lowered, SGLangNumpyEngine, feature, seed, 2, 10, only=ONLY)
        assert parted is None, (seed, parted, recording.operations[-1])


@pytest.mark.parametrize("feature", ["full", "window"])
def test_many_operations_in_one_dispatch_leave_the_same_arrays(feature: str) -> None:
    """With the configuration known, so that the program is pruned; no array is copied."""
    header, choices = draw(feature, 3, 2, ONLY)
    engine = Noted(header)
    registry.dialect_of(structs.NAME).drive(header, choices, engine.perform, 200)
    cache, static, count = engine.batch(), engine.static(), len(engine.rows)
    arrays = {name: array for name, array in LAYOUT.arrays_of(cache).items() if name not in static}
    compiled = jax.jit(lowered(LAYOUT, perform_all, static), donate_argnums=0).lower(arrays, count).compile()
    perform_all(cache, count)
    assert engine.evictions == cache.evictions > 0
    got = jax.device_get(compiled(jax.device_put(arrays), np.int32(count)))
    assert differing(got, LAYOUT.arrays_of(cache)) == []
    program = compiled.as_text()
    assert not re.findall(r"= s32\[\d{2,}\]\S* copy\(", program)
    assert program.count(" while(") <= LOOPS
    assert program.count(" conditional(") <= SEGMENTS

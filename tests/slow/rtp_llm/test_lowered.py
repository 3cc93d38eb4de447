"""RTP-LLM's text lowered to JAX, held to the same text run plainly: answers, states, and all arrays."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Mapping
from types import MappingProxyType

import jax
import numpy as np
import pytest

from hkv.dialects.rtp_llm.config import RtpConfig
from hkv.dialects.rtp_llm.engines.engine import attempt_rtp
from hkv.dialects.rtp_llm.engines.numpy import RtpNumpyEngine
from hkv.dialects.rtp_llm.log import to_rtp_header
from hkv.dialects.rtp_llm.plain import LAYOUT, settings
from hkv.lowering import lowered
from hkv.lowering.programs import Mirror, Program
from reference.dialects.rtp_llm.operations import perform_all
from reference.dialects.rtp_llm.records import Code
from tests.rtp_llm.batches import Noted, differing
from tests.rtp_llm.traffic import draw_config, draw_operation

ROOM = MappingProxyType({"keys": 1023, "slots": 8, "batch": 4, "row": 128, "payload": 512, "told": 4096})
LIKE = MappingProxyType({"groups": 3, "blocks": 24})
"""Room for every cache that is drawn, so that one program serves all."""

LOOPS, SEGMENTS = 185, 180
"""Most loops, and conditional segments, of a program: call sites make compile time."""


class Plain(RtpNumpyEngine):
    """The text, with that room."""

    room = MappingProxyType({**ROOM, **LIKE})


class Lowered(Plain):
    """The lowered text, an operation a dispatch; the configuration is data."""

    mirror: Mirror | None = None

    def _perform(self, code: Code) -> None:
        if self.mirror is None:
            self.mirror = Mirror(LAYOUT, _program(), self.cache, ("operations", "payload", "numbers"))
        self.mirror.perform(1)


@functools.cache
def _program() -> Program:
    return Program(LAYOUT, perform_all)


def test_lowered_it_answers_as_it_does_plainly() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        header = to_rtp_header(draw_config(rng), "random")
        plain, compiled = Plain(header), Lowered(header)
        for number in range(60):
            operation = draw_operation(rng, number, plain)
            want, got = attempt_rtp(plain, operation), attempt_rtp(compiled, operation)
            assert got == want, (seed, number, operation)
            assert compiled.state() == plain.state(), (seed, number, operation)
        assert differing(LAYOUT.arrays_of(compiled.cache), LAYOUT.arrays_of(plain.cache)) == [], seed


SHAPES: Mapping[str, Mapping[str, int]] = {
    "one full group": {"single": 1, "tree": 0},
    "several groups over one pool": {"single": 0, "apart": 0, "tree": 0},
    "a pool for each, with the prefix tree": {"apart": 1, "tree": 1},
}


def drawn(shape: Mapping[str, int]) -> RtpConfig:
    """The first configuration of a shape."""
    configs = (draw_config(random.Random(seed)) for seed in range(1000))
    return next(c for c in configs if all(settings(c)[f"config.{name}"] == value for name, value in shape.items()))


@pytest.mark.parametrize("shape", SHAPES)
def test_many_operations_in_one_dispatch_leave_the_same_arrays(shape: str) -> None:
    """With the configuration known, so that the program is pruned; no array is copied."""
    config, rng = drawn(SHAPES[shape]), random.Random(1)
    engine, static = Noted(to_rtp_header(config, "random")), settings(config)
    for number in range(400):
        attempt_rtp(engine, draw_operation(rng, number, engine))
    begun, count = engine.begun(), len(engine.batch)
    cache = LAYOUT.restored(begun)
    arrays = {name: array for name, array in begun.items() if name not in static}
    compiled = jax.jit(lowered(LAYOUT, perform_all, static), donate_argnums=0).lower(arrays, count).compile()
    perform_all(cache, count)
    assert engine.evictions == cache.evictions > 0
    got = jax.device_get(compiled(jax.device_put(arrays), np.int32(count)))
    assert differing(got, LAYOUT.arrays_of(cache)) == []
    program = compiled.as_text()
    assert not re.findall(r"= s32\[\d{2,}\]\S* copy\(", program)
    assert program.count(" while(") <= LOOPS
    assert program.count(" conditional(") <= SEGMENTS

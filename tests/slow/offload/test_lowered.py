"""Texts of schedulers with a second tier run plainly and lowered: every element of the state."""

from __future__ import annotations

import jax.numpy as jnp
import msgspec
import pytest

from hkv.dialects.vllm.offload import log as structs
from hkv.dialects.vllm.offload.config import BUGS
from hkv.oracle.record import Only, draw
from reference.dialects.vllm.offload.serving import perform_all
from tests.lowering import harness
from tests.slow.offload.serving_batches import batch, driven, padded, performed

STATIC = (
    *("events", "explains", "zeroing", "parts", "partial", "alone", "states", "runs", "exporting", "twins", "sinks"),
    *("arc", "lazy", "tells"),
)
"""Scalars of caches that prune a program."""

LIMITS = {"native": (410, 345, 109_000), "simple": (320, 300, 95_000)}
"""Loops, segments and lines of a program at most."""


@pytest.mark.parametrize(("name", "feature", "seed"), [("native", "tails", 1), ("simple", "simple_tails", 1)])
def test_the_lowered_scheduler_is_the_plain_one(name: str, feature: str, seed: int) -> None:
    header, _ = draw(feature, seed, 2, Only(dialect=structs.OFFLOAD))
    header = msgspec.structs.replace(header, bugs=sorted(BUGS) if name == "native" else [])
    runs = []
    for traffic in range(2):
        noted = driven(header, traffic, 8)
        plain, jobs = performed(noted)
        state, count = batch(noted, jobs)
        assert plain.active == noted.serving.active
        runs.append((noted, plain, state, count))
    layout = runs[0][0]._layout
    sizes = [layout.sizes_of(state) for _, _, state, _ in runs]
    most = {field: max(each[field] for each in sizes) for field in sizes[0]}
    program = None
    for _, plain, state, count in runs:
        for each in (plain, state):
            padded(layout, each, most)
        start = layout.arrays_of(state)
        static = {field: int(start[field]) for field in layout.settings if field.rpartition(".")[2] in STATIC}
        program = program or harness.compiled(layout, perform_all, start, count, static=static)
        got = program(harness.device(start, static), jnp.int32(count))
        assert not harness.differing(layout, got, layout.arrays_of(plain))
    assert program is not None
    found = harness.counts(program)
    assert all(each <= limit for each, limit in zip(found.values(), (*LIMITS[name], 0), strict=True)), found

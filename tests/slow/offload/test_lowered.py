"""The connector's text run plainly and lowered, on what schedulers ask of it: every element of the state."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from hkv.dialects.vllm.offload.config import BUGS
from hkv.dialects.vllm.offload.plain import LAYOUT
from hkv.dialects.vllm.offload.traffic import OF_SIMPLE, SCHEDULER_FEATURES
from reference.dialects.vllm.offload.connector import perform_all
from tests.lowering import harness
from tests.slow.offload.step_batches import driven

FEATURES = [feature for feature in SCHEDULER_FEATURES if feature not in OF_SIMPLE]

LIMITS = {"loops": 165, "segments": 110, "lines": 34_000, "copies": 0}
"""Of a program, whose configuration is data but for the policy."""


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_the_lowered_connector_is_the_plain_one(policy: str) -> None:
    program, refused, counts = None, 0, dict.fromkeys(("evicted", "loaded", "stored"), 0)
    for feature in FEATURES:
        for seed in range(6):
            changes: dict[str, Any] = {"policy": policy, "threshold": 2 * (seed % 3 == 2)}
            noted = driven(feature, seed, {**changes, "bugs": sorted(BUGS) if seed % 2 else []})
            plain, jobs = noted.performed()
            # As the scheduler's own, whose records others had before.
            assert vars(plain.counts) == vars(noted.tier.counts)
            assert (plain.number, plain.refused, plain.idle) == (noted.tier.number, noted.tier.refused, noted.tier.idle)
            tier, count = noted.batch(jobs), len(noted.noted)
            start, static = LAYOUT.arrays_of(tier), {"config.arc": int(policy == "arc"), "config.tells": 0}
            program = program or harness.compiled(LAYOUT, perform_all, start, count, static=static)
            got = program(harness.device(start, static), jnp.int32(count))
            assert not harness.differing(LAYOUT, got, LAYOUT.arrays_of(plain)), (feature, seed)
            refused += plain.refused
            counts = {name: counts[name] + getattr(plain.counts, name) for name in counts}
    assert min(counts.values()) > 100, counts
    assert refused > 20
    assert program is not None
    found = harness.counts(program)
    assert all(found[name] <= most for name, most in LIMITS.items()), found

"""The pool's text run plainly and lowered: every element of the state, and what the programs are made of."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from hkv.dialects.vllm.offload.plain import LAYOUT
from reference.dialects.vllm.offload.pool import perform_all
from tests.lowering import harness
from tests.offload.pool_batches import played

SIZES = {"keys": 200, "uses": 2_000, "requests": 200, "operations": 240, "payload": 2_000}

LIMITS = {("lru", 0): (67, 50, 15_000), ("arc", 2): (67, 50, 15_000)}
"""Loops, segments and lines of a program at most."""


@pytest.mark.parametrize(("policy", "threshold"), LIMITS)
def test_the_lowered_pool_is_the_plain_one(policy: str, threshold: int) -> None:
    program, evicted, refused = None, 0, 0
    for seed, (chunks, tracked) in enumerate([(3, 5), (8, 64_000), (20, 12)] * 4):
        pool = played(seed, chunks, policy, threshold, tracked)
        tier = pool.batch(**SIZES)
        static = {"config.arc": int(policy == "arc"), "config.tells": 0}
        start, count = LAYOUT.arrays_of(tier), len(pool.noted)
        program = program or harness.compiled(LAYOUT, perform_all, start, count, static=static)
        got = program(harness.device(start, static), jnp.int32(count))
        perform_all(tier, count)
        assert not harness.differing(LAYOUT, got, LAYOUT.arrays_of(tier))
        # Performed one by one, with records that others had before, it came to the same.
        assert vars(tier.counts) == vars(pool.counts)
        assert (tier.handed_out, tier.unused, tier.idle) == (pool.tier.handed_out, pool.tier.unused, pool.tier.idle)
        evicted, refused = evicted + tier.counts.evicted, refused + tier.counts.refused
    assert evicted > 100
    assert refused > 10
    assert program is not None
    found, limits = harness.counts(program), (*LIMITS[policy, threshold], 0)
    assert all(each <= most for each, most in zip(found.values(), limits, strict=True)), found

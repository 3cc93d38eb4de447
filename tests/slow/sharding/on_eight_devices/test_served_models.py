"""Checkpoints served with pools on eight devices say what they say on one: heads shared out, or copied where fewer."""

from __future__ import annotations

import jax
import pytest

from tests.slow.examples.served_checkpoints import engine, served


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_the_same_is_said(family):
    """Two key heads of windows and sinks on eight devices, and latents, which every device keeps whole."""
    made = engine(family, rows=3, budget=13, devices=8)
    requests = served(made, family, (0, 1, 2, 3, 1, 0))
    assert requests[-1].hits[0] > 24
    assert len(made.served.pool.sharding.device_set) == len(jax.devices()) == 8
    assert {len(shard.data) for shard in made.served.pool.addressable_shards} == {len(made.served.pool) // 8}

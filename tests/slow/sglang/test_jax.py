"""Replays of traces by the compiled schedule under SGLang's rules."""

from __future__ import annotations

from typing import Any

import pytest

from hkv.replay.verb import replay_trace
from hkv.spec import spec_from_text
from tests.sglang.test_dialect import CHATS


@pytest.mark.parametrize(
    ("groups", "blocks", "step_tokens"),
    [
        ("full:16,swa:16:64", 240, 300),
        ("full:16,swa:16:64", [480, 120], 8192),
        ("full:16", 150, 300),
        ("full:16,mamba:16", [150, 40], 300),
        ("full:16,swa:16:64,mamba:16", [640, 240, 30], 8192),
    ],
)
def test_a_trace_fares_as_with_the_reference(groups: str, blocks: Any, step_tokens: int) -> None:
    """Every request's result, every step, all that is left in the cache; with small chunks requests are preempted."""
    given: dict[str, Any] = {"dialect": "sglang-0.5.23", "engine": "jax", "check": True, "limit": 30}
    given["dialect_options"] = {"schedule_policy": "replay"}
    specs = [spec_from_text(each) for each in groups.split(",")]
    found = replay_trace(CHATS, specs, blocks, step_tokens=step_tokens, **given)
    assert found.totals["hit_tokens"] > 0
    assert (found.totals["preemptions"] > 0) == (step_tokens == 300)

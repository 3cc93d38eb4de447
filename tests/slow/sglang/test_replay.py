"""Replays of traces under SGLang's rules: the text lowered, beside the plain schedule over the reference."""

from __future__ import annotations

from typing import Any

import pytest

from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.schedule import REPLAY, SGLangCompiledReplay
from hkv.replay.dispatches import incoming
from hkv.replay.lowered import program
from hkv.replay.verb import replay_trace
from hkv.spec import spec_from_text
from reference.replay import run
from tests.cache.build import large_copies
from tests.sglang.test_dialect import CHATS
from tests.sglang.test_replay_text import case

LOOPS, SEGMENTS = 160, 170
"""Most loops, and conditional segments, of a replay's program: call sites make compile time."""


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


@pytest.mark.parametrize("seed", [2, 3])
def test_no_array_is_copied(seed: int) -> None:
    given, schedule, coming = case(seed)
    replay = SGLangCompiledReplay(structs.to_config(given), schedule, incoming(coming, schedule.max_model_len))
    text = program(REPLAY, run, replay._known).lower(replay.resident).compile().as_text()
    assert large_copies(text, 64) == []
    assert text.count(" while(") <= LOOPS
    assert text.count(" conditional(") <= SEGMENTS

"""A replay of a few conversations in a pool that evicts, for pages and traces of it."""

from __future__ import annotations

from hkv.dialects.vllm.schedule.run import VllmReplayedCache, cache_config
from hkv.replay.run import Outcome, Timing, replay
from hkv.replay.schedule import Schedule
from hkv.replay.traces.reader import TraceRequest
from hkv.spec import spec_from_text

GROUPS = ("full:4", "swa:4:8")


def replayed(blocks: int = 40) -> Outcome:
    """Twelve prompts of four conversations, each longer than before, in a pool too small for all of them."""
    schedule = Schedule(step_tokens=32, decode_tokens=2, max_running=4, max_model_len=128)
    cache = VllmReplayedCache(cache_config([spec_from_text(text) for text in GROUPS], blocks, schedule))
    trace = [
        TraceRequest(
            line=line,
            timestamp=100 * line,
            input_length=12 * (1 + line // 4),
            output_length=4,
            tokens=[100 * (line % 4) + place for place in range(12 * (1 + line // 4))],
        )
        for line in range(12)
    ]
    return replay(trace, cache, schedule, Timing(), engine="numpy", sampled=True)

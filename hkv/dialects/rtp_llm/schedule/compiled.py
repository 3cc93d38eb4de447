"""Replays under RTP-LLM's rules, compiled: `reference.dialects.rtp_llm.replay` over a trace's arrays."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np

from hkv.dialects.rtp_llm.config import RtpConfig
from hkv.dialects.rtp_llm.engines.numpy import VERDICTS
from hkv.dialects.rtp_llm.log import RtpState
from hkv.dialects.rtp_llm.plain import LAYOUT, empty_arrays, settings, state
from hkv.dialects.rtp_llm.schedule.agreement import REASONS, RtpRecorder
from hkv.replay.dispatches import Incoming, rounded
from hkv.replay.lowered import LoweredReplay
from hkv.replay.schedule import Schedule
from reference.dialects.rtp_llm.replay import RtpReplay, begin
from reference.language import Layout

REPLAY = Layout(RtpReplay)
"""Names and places of the state of a replay."""

DATA = ("config.groups", "config.block", "config.step", "config.reserve", "config.reused")
"""Settings that are data, so that programs serve many configurations."""


class RtpCompiledReplay(LoweredReplay):
    """A trace, a cache and a schedule, replayed in as few dispatches as steps allow; of a shared pool with room for so
    many blocks at least."""

    def __init__(
        self,
        config: RtpConfig,
        schedule: Schedule,
        trace: Incoming,
        *,
        caching: bool = True,
        diagnose: bool = True,
        room: int = 0,
    ) -> None:
        self.config, self._diagnose = config, diagnose
        lives, groups = rounded(trace.slots(schedule.max_running), 16), rounded(len(config.policies), 2)
        longest = trace.longest(schedule.max_model_len)
        row = rounded(-(-longest // config.block_size) + schedule.lookahead + 3, 64)
        keys, payload = rounded(max(1, trace.num_keys), 1024), rounded(len(trace.keys), 4096)
        blocks = rounded(max(*config.num_blocks, room if len(config.num_blocks) == 1 else 0), 1024)
        sizes = {"keys": keys, "slots": lives, "batch": 1, "row": row, "told": 3 * groups}
        arrays = empty_arrays(config, **sizes, groups=groups, blocks=blocks)
        # A key's record is its number, from 2 on: the first ends the order of use.
        arrays["payload"] = trace.payload(payload) + 2
        given = {f"cache.{name}": array for name, array in arrays.items()}
        known = {f"cache.{name}": value for name, value in settings(config).items() if name not in DATA}
        data = {name: array for name, array in given.items() if name not in known}
        data["options.reserve"] = schedule.lookahead + 1 if schedule.lookahead else 0
        data["options.caching"], known["options.diagnoses"] = caching, int(diagnose)
        more = {"lives": lives, "arrivals.reasons": groups, "verdicts": 2 * len(VERDICTS), "cache.keys": keys + 1}
        super().__init__(REPLAY, (begin, ()), known, data, more, trace, schedule)

    @property
    def evictions(self) -> int:
        """Blocks that were evicted."""
        return self.number("cache.evictions")

    @property
    def duplicates(self) -> int:
        """Blocks that were not cached because another one was there."""
        return self.number("duplicates")

    def left(self) -> dict[str, Any]:
        """Fields of the outcome, once it has run."""
        return {**self.recorder().left(), "state": self.state}

    def state(self) -> RtpState:
        """Everything of the cache that can be compared; keys are the trace's numbers, requests are not listed."""
        cache = self.cache(LAYOUT)
        return state(cache, {}, {key: number for number, key in enumerate(cache.keys[2:])})

    def recorder(self) -> RtpRecorder:
        """Everything that happened, as the plain schedule's observer would have recorded it."""
        recorder = RtpRecorder(self.config, None, self, lambda: None)
        self.record(recorder, REASONS if self._diagnose else (), len(self.config.policies))
        recorder.cached_peak = self.number("cached_peak")
        counts = np.asarray(self.resident["verdicts"])[:-1].reshape(2, -1).tolist()
        for kind, each in zip(("admission", "growth"), counts, strict=True):
            named = {name: count for name, count in zip(VERDICTS, each, strict=True) if count}
            recorder.verdicts[kind] = collections.Counter(named)
        return recorder

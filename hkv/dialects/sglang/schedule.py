"""Replays under SGLang's rules, compiled: `reference.dialects.sglang.replay` over a trace's arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.config import SLIDE_EVERY, SGLangConfig
from hkv.dialects.sglang.engines.pages import Pages
from hkv.dialects.sglang.plain import LAYOUT, Reader, pages_of, settings, sizes_of
from hkv.dialects.sglang.scheduler import bounded
from hkv.replay.dispatches import Incoming, rounded
from hkv.replay.lowered import LoweredReplay
from hkv.replay.schedule import Recorder, Schedule
from reference.dialects.sglang.replay import SGLangReplay, begin
from reference.language import Layout

REPLAY = Layout(SGLangReplay)
"""Names and places of the state of a replay."""

DATA = ("config.page", "config.window")
"""Settings that are data where they are not 0, so that programs serve many configurations."""


class SGLangCompiledReplay(LoweredReplay):
    """A trace, a cache and a schedule, replayed in as few dispatches as steps allow; with room for so many pages at
    least, over all pools."""

    def __init__(self, config: SGLangConfig, schedule: Schedule, trace: Incoming, *, room: int = 0) -> None:
        self.config, self._pages = config, pages_of(config)
        schedule = bounded(config, schedule)
        lives = rounded(trace.slots(schedule.max_running), 16)
        room = rounded(max(*self._pages, room // len(config.num_slots)) + 1, 1024)
        row = rounded(-(-trace.longest(schedule.max_model_len) // config.page_size) + 2, 64)
        keys, payload = rounded(max(1, trace.num_keys), 1024), rounded(len(trace.keys), 4096)
        sizes = sizes_of(config, keys=keys, requests=lives, row=row, payload=payload, room=room)
        given = {f"cache.{name}": value for name, value in settings(config).items()}
        data = {name: given.pop(name) for name in (f"cache.{each}" for each in DATA) if given[name]}
        data |= {f"cache.{pool}.mask": sizes[f"{pool}.free"] - 1 for pool in ("full", "swa", "states")}
        data |= {"cache.slots": lives, "cache.row": row, "rhythm.pages": sum(self._pages), "rhythm.slide": SLIDE_EVERY}
        data |= {"rhythm.grid": config.state_grid, "rhythm.track": config.track_interval}
        sizes = {f"cache.{name}": size for name, size in sizes.items()}
        sizes |= {"arrivals.reasons": 1, "lives": lives}
        begins = (*self._pages, sizes["cache.nodes"])
        super().__init__(REPLAY, (begin, begins), given, data, sizes, trace, schedule)
        # A key's record is the number of its page, from 1 on.
        self._state |= {"cache.payload": trace.payload(len(self._state["cache.payload"])) + 1}

    def left(self) -> dict[str, Any]:
        """Fields of the outcome, once it has run."""
        return {"recorder": self.recorder(), "evictions": self.number("cache.evictions")}

    def recorder(self) -> Recorder:
        """Everything that happened, as the plain schedule's observer would have recorded it."""
        recorder = Recorder(sum(self._pages) + 1, None, lambda: None)
        self.record(recorder)
        return recorder

    def state(self) -> structs.State:
        """The whole state of the cache, in which no request is left."""
        reader = Reader(self.config, TracePages(self.config.page_size, bigrams=False))
        return reader.state(self.cache(LAYOUT), {})


class TracePages(Pages):
    """Pages of a trace, which says which prefixes are equal, not what they consist of: its tokens are its number."""

    def tokens(self, numbers: Sequence[int]) -> list[int]:
        """Tokens of pages that follow each other."""
        return [number for number in numbers for _ in range(self._size)]

    def namespace(self, number: int) -> tuple[str | None, str | None]:
        """All pages have the same."""
        return None, None

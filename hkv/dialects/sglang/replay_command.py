"""Request traces through SGLang's cache, token by token, as its scheduler asks of it.

A request takes what is cached and gets slots for a chunk; after each chunk it is entered, so that others find it. Then
tokens are decoded one by one, and the window slides every so many. The schedule, that is who runs when, is the one that
`hkv replay` has for every dialect, so that what differs is the cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec

from hkv.contract.options import Number, option
from hkv.dialects.sglang import log as structs
from hkv.replay.command import StudiedCache
from hkv.replay.plain import PlainCache, PlainLoop, PlainReplayCommand
from hkv.replay.schedule import LiveRequest, Refusal

SLIDE_EVERY = 128
"""Tokens after which a window slides (`SGLANG_SWA_EVICTION_INTERVAL`)."""

RATIO = 0.8
"""SGLang's `--swa-full-tokens-ratio`."""


class SGLangLoop(PlainLoop):
    """The schedule's questions as operations; `_rows` are tokens of each running request that have slots."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        header: structs.Header = self._engine.header
        self._window = structs.to_config(header).window
        self._rows: dict[str, int] = {}
        self._slid: dict[str, int] = {}

    def _enter(self, live: LiveRequest, tokens: list[int]) -> int | None:
        raise NotImplementedError("chunks are entered one by one")

    def _append(self, live: LiveRequest, tokens: list[int]) -> bool:
        raise NotImplementedError("tokens are decoded one by one")

    def _admit(self, live: LiveRequest, budget: int) -> tuple[int, int] | Refusal:
        found = self._engine.perform(structs.AdmitOp(id=live.id, tokens=self._named(live, 0)))
        self._rows[live.id], self._slid[live.id] = found.hit, 0
        new = min(live.tokens - found.hit, budget)
        if not self._chunk(live, found.hit + new):
            self._free(live, finished=False)
            return Refusal.PUT_OFF
        return found.hit, new

    def _grow(self, live: LiveRequest, new: int) -> bool:
        if live.computed + new <= live.arrival.prompt or (live.preemptions and self._rows[live.id] < live.computed):
            return self._chunk(live, live.computed + new)
        named = self._named(live, live.computed)
        while self._rows[live.id] < live.computed + new:
            self._slide(live)
            token = named[self._rows[live.id] - live.computed]
            if self._engine.perform(structs.DecodeOp(id=live.id, token=token)).slots is None:
                return False
            self._rows[live.id] += 1
        return True

    def _chunk(self, live: LiveRequest, length: int) -> bool:
        if self._engine.perform(structs.ExtendOp(id=live.id, length=length)).slots is None:
            return False
        self._rows[live.id] = length
        return True

    def _advance(self, live: LiveRequest, tokens: int) -> None:
        if live.computed < live.arrival.prompt or not live.computed:
            row = self._engine.perform(structs.CheckpointOp(id=live.id))
            self._slid[live.id] = max(self._slid[live.id], row.protected)

    def _slide(self, live: LiveRequest) -> None:
        length = self._rows[live.id]
        if self._window is not None and length - self._window >= self._slid[live.id] + SLIDE_EVERY:
            self._engine.perform(structs.SlideOp(id=live.id))
            self._slid[live.id] = length - self._window

    def _free(self, live: LiveRequest, *, finished: bool) -> None:
        kind = structs.FinishOp if finished else structs.AbortOp
        self._engine.perform(kind(id=live.id))
        del self._rows[live.id], self._slid[live.id]

    def _available(self) -> int:
        return self._engine.num_available()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGLangOptions:
    """An option of `hkv replay` that this dialect adds, and `hkv sweep` varies."""

    swa_full_tokens_ratio: float = option(
        RATIO, type=Number(0.001, 1000), help="SGLang: tokens of the window's pool as a share of the full pool's."
    )


class SGLangReplay(PlainReplayCommand):
    """Each pool by its pages, or all pages and the window's share of them; 0.5.23's defects are as they are."""

    declared = SGLangOptions

    def __init__(self) -> None:
        super().__init__(SGLangLoop)

    def num_blocks(self, options: dict[str, Any]) -> Sequence[int]:
        blocks, windows = (
            options["num_blocks"],
            [spec for spec in options["groups"] if spec.kind == structs.SLIDING_WINDOW],
        )
        if len(blocks) != 1 or not windows:
            return blocks
        full = max(1, min(blocks[0] - 1, round(blocks[0] / (1 + options["swa_full_tokens_ratio"]))))
        return full, blocks[0] - full

    def of_groups(self, options: dict[str, Any]) -> StudiedCache:
        studied = super().of_groups(options)
        header = msgspec.structs.replace(studied.cache.config, bugs=sorted(structs.BUGS))
        cache = PlainCache(header, options["groups"], SGLangLoop)
        return dataclasses.replace(studied, cache=cache)

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

from hkv.contract.log import PlainHeader
from hkv.contract.options import Number, option
from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.config import BUGS, SLIDE_EVERY
from hkv.replay.agreement import compare, compare_outcomes
from hkv.replay.plain import PlainCache, PlainReplayCommand, TokenLoop
from hkv.replay.run import COMPILED, REFERENCE, Outcome, Progress
from hkv.replay.schedule import Arrival, LiveRequest, Refusal, Schedule

RATIO = 0.8
"""SGLang's `--swa-full-tokens-ratio`."""


class SGLangLoop(TokenLoop):
    """The schedule's questions as operations; `_came` says with how many tokens each running request came."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._came: dict[str, int] = {}

    def _admit(self, live: LiveRequest, budget: int) -> tuple[int, int] | Refusal:
        found = self._engine.perform(structs.AdmitOp(id=live.id, tokens=self._named(live, 0)))
        self._came[live.id] = live.tokens
        new = min(live.tokens - found.hit, budget)
        if not self._chunk(live, found.hit + new):
            self._free(live, finished=False)
            return Refusal.PUT_OFF
        return found.hit, new

    def _grow(self, live: LiveRequest, new: int) -> bool:
        if live.computed < self._came[live.id]:
            return self._chunk(live, live.computed + new)
        for token in self._named(live, self._held[live.id])[: live.computed + new - self._held[live.id]]:
            self._engine.perform(structs.SlideOp(id=live.id, every=SLIDE_EVERY))
            if self._engine.perform(structs.DecodeOp(id=live.id, token=token)).slots is None:
                return False
            self._held[live.id] += 1
        return True

    def _chunk(self, live: LiveRequest, length: int) -> bool:
        granted = self._engine.perform(structs.ExtendOp(id=live.id, length=length)).slots is not None
        if granted:
            self._held[live.id] = length
        return granted

    def _advance(self, live: LiveRequest, tokens: int) -> None:
        if live.computed < self._came[live.id]:
            self._engine.perform(structs.CheckpointOp(id=live.id))

    def _free(self, live: LiveRequest, *, finished: bool) -> None:
        kind = structs.FinishOp if finished else structs.AbortOp
        self._engine.perform(kind(id=live.id))

    def _available(self) -> int:
        return self._engine.num_available()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGLangOptions:
    """An option of `hkv replay` that this dialect adds, and `hkv sweep` varies."""

    swa_full_tokens_ratio: float = option(
        RATIO, type=Number(0.001, 1000), help="SGLang: tokens of the window's pool as a share of the full pool's."
    )


class SGLangCache(PlainCache):
    """SGLang's cache, which the compiled schedule has unless a part of it has no compiled form."""

    def require_compiled(self) -> None:
        from hkv.dialects.sglang.rules.parameters import of_config

        of_config(structs.to_config(self.config))

    def begun(self, schedule: Schedule, prepared: Any, check: bool) -> Any:
        from hkv.dialects.sglang.schedule import SGLangCompiledReplay, sizes_of

        config = structs.to_config(self.config)
        # Replays that are compared have room for as many pages as the larger one, and so the same program.
        return SGLangCompiledReplay(config, schedule, prepared, sizes=sizes_of(config, schedule, prepared, self.room))

    def verify(
        self,
        running: Any,
        outcome: Outcome,
        schedule: Schedule,
        coming: Sequence[Arrival],
        progress: Progress = lambda: None,
    ) -> None:
        """By every request's fate, every step, and all that is left in the cache."""
        from hkv.dialects.sglang.engines.numpy import SGLangNumpyEngine

        names, reference = (COMPILED, REFERENCE), self.engine(REFERENCE, SGLangNumpyEngine)
        other = self.plain(schedule, coming, reference, reference, progress)
        compare_outcomes(outcome, other, names)
        compare("the cache's state", running.state(), reference.perform(structs.StateOp()), names)


class SGLangReplay(PlainReplayCommand):
    """Each pool by its pages, or all pages and the window's share of them; 0.5.23's defects are as they are."""

    cache = SGLangCache
    declared = SGLangOptions

    def __init__(self) -> None:
        super().__init__(SGLangLoop)

    def num_blocks(self, options: dict[str, Any]) -> Sequence[int]:
        blocks, kinds = options["num_blocks"], {spec.kind for spec in options["groups"]}
        if len(blocks) != 1 or structs.SLIDING_WINDOW not in kinds:
            return blocks
        full = max(1, min(blocks[0] - 1, round(blocks[0] / (1 + options["swa_full_tokens_ratio"]))))
        return full, blocks[0] - full

    def header(self, options: dict[str, Any]) -> PlainHeader:
        return msgspec.structs.replace(super().header(options), bugs=sorted(BUGS))

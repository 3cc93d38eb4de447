"""Record of a replay under RTP-LLM's rules: also verdicts, what the cache holds, and its reasons."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from hkv.dialects.rtp_llm.config import RtpConfig
from hkv.dialects.rtp_llm.engines import numpy
from hkv.model.group_policy import GroupType
from hkv.replay.reasons import CACHING_OFF, HAD, NOT_COMPUTED, NOT_SHARED, NOTHING, RETIRED, Lacking
from hkv.replay.record import Recorder
from hkv.replay.schedule import LiveRequest

REASONS = (
    NOTHING,
    HAD,
    numpy.EVICTED,
    RETIRED,
    NOT_SHARED,
    CACHING_OFF,
)
"""Reasons why hits end under RTP-LLM's rules, in the order in which tables list them; see `docs/replay.md`."""

REASON = {
    numpy.CACHED: HAD,
    numpy.NOT_KEPT: RETIRED,
    numpy.EVICTED: numpy.EVICTED,
    numpy.UNFINISHED: numpy.UNFINISHED,
    numpy.NEVER_SEEN: numpy.NEVER_SEEN,
}


@runtime_checkable
class RtpMissDiagnosis(Protocol):
    """Optional method of an engine besides its operations: the state of a prefix."""

    def absence(self, group: int, key: int) -> str:
        """State of the block of `group` under `key`, one of `hkv.dialects.rtp_llm.engines.numpy.STATES`."""
        ...


class RtpDiagnosis:
    """Tells what groups lack, by the definition of a joint hit: full groups all of it, the others its last key.

    Args:
      config: the cache.
      engine: asked about single blocks.
      caching: whether anything is cached at all.
    """

    def __init__(self, config: RtpConfig, engine: RtpMissDiagnosis, *, caching: bool) -> None:
        self._config, self._engine, self._caching = config, engine, caching
        groups = range(len(config.policies))
        self._full = [group for group in groups if config.policies[group].group_type is GroupType.FULL]
        self._ends = [
            group
            for group in groups
            if config.policies[group].group_type is GroupType.LINEAR
            or (config.policies[group].group_type is GroupType.SWA and config.policies[group].enable_prefix_reuse)
        ]

    def lacking(self, keys: Sequence[int], hit: int, asked: int) -> tuple[int, list[Lacking]]:
        """State of each group at the furthest boundary that was computed. Nobody knows `hit` yet; it is not used."""
        groups, size = range(len(self._config.policies)), self._config.block_size
        if not self._caching:
            return 0, [Lacking(CACHING_OFF) for _ in groups]
        states = (self._engine.absence(0, key) for key in keys[: asked // size])
        unfinished = (place for place, state in enumerate(states) if REASON[state] in NOT_COMPUTED)
        computed = next(unfinished, asked // size)
        return computed * size, [Lacking(self._reason(group, keys[:computed])) for group in groups]

    def _reason(self, group: int, keys: Sequence[int]) -> str:
        """State of the first key that a full group lacks, and of the last one in a group that keeps the end alone."""
        if group not in self._full and group not in self._ends:
            return NOT_SHARED
        states = [self._engine.absence(group, key) for key in (keys if group in self._full else keys[-1:])]
        missing = (state for state in states if state != numpy.CACHED)
        return REASON[next(missing, numpy.CACHED)] if keys else NOTHING


class RtpRecorder(Recorder):
    """A `Recorder` that also counts verdicts.

    Args:
      config: the cache.
      diagnosis: finds why hits ended, or None when the engine cannot tell.
      cached: blocks that the cache holds now, or None when the engine does not count them.
      progress: called each time a request has finished or is refused for good.

    Attributes:
      verdicts: of all allocations, admissions and growing requests apart.
      cached_peak: most blocks that the cache held when a step's blocks were allocated; None if not counted.
    """

    def __init__(
        self,
        config: RtpConfig,
        diagnosis: RtpDiagnosis | None,
        cached: Callable[[], int] | None,
        progress: Callable[[], None],
    ) -> None:
        usable = sum(config.num_blocks) - len(config.num_blocks)
        super().__init__(usable + 1, diagnosis, progress)
        self.verdicts: dict[str, collections.Counter[str]] = {
            "admission": collections.Counter(),
            "growth": collections.Counter(),
        }
        self.cached_peak: int | None = None if cached is None else 0
        self._cached = cached
        self._asked: LiveRequest | None = None

    def asked(self, step: int, live: LiveRequest) -> None:
        self._asked = live
        self.looked_up(step, live, 0)

    def answered(self, step: int, live: LiveRequest, verdict: str) -> None:
        self.verdicts["admission" if live is self._asked else "growth"][verdict] += 1
        self._asked = None

    def scheduled(self, step: int, running: int, waiting: int, free: int) -> None:
        super().scheduled(step, running, waiting, free)
        if self._cached is not None:
            self.cached_peak = max(self.cached_peak or 0, self._cached())

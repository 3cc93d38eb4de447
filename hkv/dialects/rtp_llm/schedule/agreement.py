"""Two replays under RTP-LLM's rules held against each other: engines side by side, or one after a compiled replay."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from hkv.contract.answer import compare
from hkv.contract.log import describe
from hkv.dialects.rtp_llm.config import RtpConfig
from hkv.dialects.rtp_llm.engines import numpy
from hkv.dialects.rtp_llm.log import RtpState
from hkv.model.group_policy import GroupType
from hkv.replay.agreement import Difference, Lockstep, Part
from hkv.replay.observed import CACHING_OFF, HAD, NOT_COMPUTED, NOT_SHARED, NOTHING, RETIRED, MissReason
from hkv.replay.schedule import LiveRequest, Recorder

# Record of a replay under RTP-LLM's rules: also verdicts, what the cache holds, and its reasons.

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
    """Keys missing from groups for a joint hit, by its definition: full groups need all of it, the others its end."""

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

    def miss_reasons(self, keys: Sequence[int], hit: int, asked: int) -> tuple[int, list[MissReason]]:
        """State of each group at the furthest boundary that was computed. Nobody knows `hit` yet; it is not used."""
        groups, size = range(len(self._config.policies)), self._config.block_size
        if not self._caching:
            return 0, [MissReason(CACHING_OFF) for _ in groups]
        states = (self._engine.absence(0, key) for key in keys[: asked // size])
        unfinished = (place for place, state in enumerate(states) if REASON[state] in NOT_COMPUTED)
        computed = next(unfinished, asked // size)
        return computed * size, [MissReason(self._reason(group, keys[:computed])) for group in groups]

    def _reason(self, group: int, keys: Sequence[int]) -> str:
        """State of the first key missing from a full group, and of the last one in a group that keeps the end alone."""
        if group not in self._full and group not in self._ends:
            return NOT_SHARED
        states = [self._engine.absence(group, key) for key in (keys if group in self._full else keys[-1:])]
        missing = (state for state in states if state != numpy.CACHED)
        return REASON[next(missing, numpy.CACHED)] if keys else NOTHING


class RtpRecorder(Recorder):
    """A `Recorder` that also counts verdicts; `oracle` counts evictions and duplicates, if it does.

    Attributes:
      verdicts: of all allocations, admissions and growing requests apart.
      cached_peak: most blocks that the cache held when a step's blocks were allocated; None if not counted.
    """

    def __init__(
        self,
        config: RtpConfig,
        diagnosis: RtpDiagnosis | None,
        oracle: Any,
        progress: Callable[[], None],
    ) -> None:
        usable = sum(config.num_blocks) - len(config.num_blocks)
        super().__init__(usable + 1, diagnosis, progress)
        self.verdicts: dict[str, collections.Counter[str]] = {
            "admission": collections.Counter(),
            "growth": collections.Counter(),
        }
        self._oracle, self._cached = oracle, getattr(oracle, "num_cached", None)
        self.cached_peak: int | None = None if self._cached is None else 0
        self._asked: LiveRequest | None = None

    def left(self) -> dict[str, Any]:
        """Fields of the outcome that it knows."""
        extra = {
            "verdicts": {name: dict(counter) for name, counter in self.verdicts.items()},
            "blocks_cached_peak": self.cached_peak,
            "blocks_not_cached_twice": getattr(self._oracle, "duplicates", None),
        }
        return {"recorder": self, "evictions": getattr(self._oracle, "evictions", None), "extra": extra}

    def asked(self, live: LiveRequest) -> None:
        self._asked = live
        self.looked_up(live, 0)

    def answered(self, live: LiveRequest, verdict: str) -> None:
        self.verdicts["admission" if live is self._asked else "growth"][verdict] += 1
        self._asked = None

    def scheduled(self, step: int, running: int, waiting: int, free: int) -> None:
        super().scheduled(step, running, waiting, free)
        if self._cached is not None:
            self.cached_peak = max(self.cached_peak or 0, self._cached())


class RtpLockstep(Lockstep):
    """Two `KeyedRtpEngine`s side by side."""

    operations = ("perform", "request_keyed", "extend", "num_available")

    def _parts(self, name: str, arguments: tuple[Any, ...], mine: Any, other: Any) -> Iterator[Part]:
        if name == "num_available":
            yield name, "", "blocks", mine, other
        mismatch = compare(other, mine) if name == "perform" else None
        if mismatch is not None:
            operation, *_ = describe(arguments[0]).split()
            yield operation, getattr(arguments[0], "id", ""), mismatch.field, mismatch.got, mismatch.want


def compare_states(mine: RtpState, other: RtpState, names: tuple[str, str]) -> None:
    """Compares two caches, their free sets, references and keys in order of use."""
    mismatch = compare(other, mine)
    if mismatch is not None:
        answers = dict(zip(names, (mismatch.got, mismatch.want), strict=True))
        raise Difference(0, "replay", "", f"{mismatch.field} at the end", answers)

"""Reasons why a cache hit ended where it did, group by group."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from hkv.dialects.vllm.config import VllmConfig
from hkv.replay.reasons import CACHING_OFF, NOT_SHARED, RETIRED, WAITING, WHOLE_PROMPT

FELL_SHORT = "lookup fell short"

REASONS = (
    WHOLE_PROMPT,
    "never seen",
    "evicted",
    RETIRED,
    "not retained",
    WAITING,
    FELL_SHORT,
    NOT_SHARED,
    CACHING_OFF,
)
"""Every reason, in the order in which tables list them. `docs/replay.md` explains each."""

CACHED = "cached"

_REASON_OF_ABSENCE = {
    "never seen": "never seen",
    "evicted": "evicted",
    "retired": RETIRED,
    "not retained": "not retained",
}


@runtime_checkable
class MissDiagnosis(Protocol):
    """Optional method of an engine besides its operations: the state of a prefix."""

    def absence(self, group: int, key: int) -> str:
        """State of the block of `group` that ends where the prefix `key` ends.

        One of `cached`; `never seen`: no request ever computed it; `evicted`: it was cached and its block was handed
        out again; `retired`: its block was already given back when its span was to be registered; `not retained`: the
        retention rule left it out.
        """
        ...


class Diagnosis:
    """Finds the reasons, given an engine that can be asked.

    Args:
      config: the cache.
      engine: asked about single blocks.
    """

    def __init__(self, config: VllmConfig, engine: MissDiagnosis) -> None:
        self._engine = engine
        self._caching = config.caching
        groups = range(len(config.topology.groups))
        self._alignment = config.scheduler_block_size if len(groups) > 1 else config.block_size(0)
        if config.partial_hits:
            self._alignment = config.hash_block_size
        self._groups = [_GroupView(config, group, engine, self._alignment) for group in groups]

    def reasons(self, keys: Sequence[int], tokens: int, hit: int) -> list[str]:
        """One reason per group, for a lookup just made, before its blocks are allocated.

        Args:
          keys: the request's prefix keys.
          tokens: tokens the request has.
          hit: tokens the lookup found.
        """
        if not self._caching:
            return [CACHING_OFF] * len(self._groups)
        sharing = [group for group in self._groups if group.shared]
        top = min((group.furthest(tokens) for group in sharing), default=0) // self._alignment * self._alignment
        if hit >= top:
            return [WHOLE_PROMPT if group.shared else NOT_SHARED for group in self._groups]
        boundaries = range(hit + self._alignment, top + 1, self._alignment)
        further = [group.shared and group.resumes_somewhere(keys, hit, boundaries) for group in self._groups]
        waiting = WAITING
        if all(found or not group.shared for found, group in zip(further, self._groups, strict=True)) and any(
            all(group.resumes_at(keys, hit, boundary) for group in sharing) for boundary in boundaries
        ):
            waiting = FELL_SHORT
        return [
            self._reason(group, waiting if found else "", keys, hit, boundaries[0])
            for group, found in zip(self._groups, further, strict=True)
        ]

    def _reason(self, group: _GroupView, waiting: str, keys: Sequence[int], hit: int, boundary: int) -> str:
        if not group.shared:
            return NOT_SHARED
        return waiting or group.missing(keys, hit, boundary)


class _GroupView:
    """One group's side of a lookup: which blocks a request needs in order to resume at a boundary."""

    def __init__(self, config: VllmConfig, group: int, engine: MissDiagnosis, alignment: int) -> None:
        self._spec = config.topology.specs[group]
        self._group = group
        self._engine = engine
        self._block = config.block_size(group)
        self._hash_block = config.hash_block_size
        self._proof = 0
        if group in config.eagle_group_ids and not self._spec.snapshot:
            self._proof = min(alignment, self._block) if config.partial_hits else self._block
        self.shared = self._spec.prefix_cacheable
        every = range(alignment, config.max_model_len + 1, alignment) if self.shared else range(0)
        self._unneeding = [boundary for boundary in every if not self._needs_anything(boundary)]

    def furthest(self, tokens: int) -> int:
        """The furthest token to resume at: the last token is always computed; a draft's proof must be whole."""
        return min(tokens - 1, tokens // self._hash_block * self._hash_block - self._proof)

    def resumes_at(self, keys: Sequence[int], hit: int, boundary: int) -> bool:
        """True if a request could resume at `boundary`, beyond its `hit`, were this the only group."""
        return self._last_lacking(keys, hit, boundary) is None and self._tail(keys, boundary) == CACHED

    def resumes_somewhere(self, keys: Sequence[int], hit: int, boundaries: range) -> bool:
        """True if a request could resume at any of the `boundaries` beyond its `hit`, were this the only group."""
        unneeding = bisect.bisect_left(self._unneeding, boundaries[0])
        if unneeding < len(self._unneeding) and self._unneeding[unneeding] <= boundaries[-1]:
            return True
        seen = self._first_never_seen(keys, hit // self._block, self._whole(boundaries[-1]).stop)
        end = bisect.bisect_right(boundaries, seen, key=lambda boundary: self._whole(boundary).stop)
        place = 0
        while place < end:
            lacking = self._last_lacking(keys, hit, boundaries[place])
            if lacking is not None:
                place = bisect.bisect_right(boundaries, lacking, place, end, key=lambda n: self._whole(n).start)
            elif self._tail(keys, boundaries[place]) == CACHED:
                return True
            else:
                place += 1
        return False

    def missing(self, keys: Sequence[int], hit: int, boundary: int) -> str:
        """Reason why the block is missing that keeps this group from resuming at `boundary`, the first one after `hit`.

        The first block it lacks for groups whose queries read everything; else the last, where the search for a
        window or a state begins.
        """
        blocks = [self._absence(keys, index) for index in self._still_open(hit, boundary)]
        absences = [*blocks, self._tail_missing(keys, boundary)]
        order = absences if self._reads_all(boundary) else reversed(absences)
        return next(_REASON_OF_ABSENCE[absence] for absence in order if absence != CACHED)

    def _whole(self, boundary: int) -> range:
        """Indices of the whole blocks that must be cached for a request to resume at `boundary`."""
        return range(self._spec.readable(boundary).start // self._block, (boundary + self._proof) // self._block)

    def _needs_anything(self, boundary: int) -> bool:
        return bool(self._whole(boundary)) or (boundary + self._proof) % self._block != 0

    def _tail(self, keys: Sequence[int], boundary: int) -> str:
        """State of the partly filled block at the end of what is needed; `cached` if none is needed."""
        end = boundary + self._proof
        return self._engine.absence(self._group, keys[end // self._hash_block - 1]) if end % self._block else CACHED

    def _tail_missing(self, keys: Sequence[int], boundary: int) -> str:
        """State as by `_tail`; if a block that reaches further is known, the boundary within it was not retained."""
        absence, index = self._tail(keys, boundary), (boundary + self._proof) // self._block
        known = (index + 1) * self._block // self._hash_block <= len(keys)
        if absence == "never seen" and known and self._absence(keys, index) != "never seen":
            return "not retained"
        return absence

    def _still_open(self, hit: int, boundary: int) -> range:
        """The needed blocks that the hit itself does not show to be cached."""
        blocks = self._whole(boundary)
        return range(max(blocks.start, hit // self._block), blocks.stop) if self._reads_all(boundary) else blocks

    def _last_lacking(self, keys: Sequence[int], hit: int, boundary: int) -> int | None:
        """Index of the last whole block that is needed at `boundary` and not cached; None when there is none."""
        blocks = self._still_open(hit, boundary)
        return next((index for index in reversed(blocks) if self._absence(keys, index) != CACHED), None)

    def _reads_all(self, boundary: int) -> bool:
        return not self._spec.snapshot and self._spec.readable(boundary).start == 0

    def _first_never_seen(self, keys: Sequence[int], start: int, stop: int) -> int:
        """Blocks are computed in order, so that all after one that was never seen were not either."""
        while start < stop:
            middle = (start + stop) // 2
            if self._absence(keys, middle) == "never seen":
                stop = middle
            else:
                start = middle + 1
        return stop

    def _absence(self, keys: Sequence[int], index: int) -> str:
        return self._engine.absence(self._group, keys[(index + 1) * self._block // self._hash_block - 1])

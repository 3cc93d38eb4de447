"""Reasons why a cache hit ended where it did, group by group."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from hkv.dialects.vllm.config import VllmConfig
from hkv.replay.hit_units import HitUnits
from hkv.replay.reasons import (
    CACHING_OFF,
    EVICTED,
    FELL_SHORT,
    NEVER_SEEN,
    NOT_RETAINED,
    NOT_SHARED,
    RETIRED,
    WAITING,
    WHOLE_PROMPT,
    GroupSearch,
)

REASONS = (
    WHOLE_PROMPT,
    NEVER_SEEN,
    EVICTED,
    RETIRED,
    NOT_RETAINED,
    WAITING,
    FELL_SHORT,
    NOT_SHARED,
    CACHING_OFF,
)
"""Every reason, in the order in which tables list them. `docs/replay.md` explains each."""

CACHED = "cached"

_REASON_OF_ABSENCE = {
    "never seen": NEVER_SEEN,
    "evicted": EVICTED,
    "retired": RETIRED,
    "not retained": NOT_RETAINED,
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

    def eviction(self, group: int, key: int) -> tuple[int, int] | None:
        """The step, 1 before the first begins, in which such a block was evicted, and the group that got it.

        None where it was not handed out, or is cached.
        """
        ...


def hit_units(config: VllmConfig) -> HitUnits:
    """The units in which a cache under vLLM 0.33's rules finds prefixes."""
    unit = _alignment(config)
    groups = range(len(config.topology.groups))
    most = max((proof(config, group) for group in groups if _shared(config, group)), default=0)
    return HitUnits(config.hash_block_size, unit, most, any(_shared(config, group) for group in groups))


def _shared(config: VllmConfig, group: int) -> bool:
    return config.topology.specs[group].prefix_cacheable


def _alignment(config: VllmConfig) -> int:
    """Tokens between two boundaries at which hits may end."""
    if config.partial_hits:
        return config.hash_block_size
    return config.scheduler_block_size if len(config.topology.groups) > 1 else config.block_size(0)


def proof(config: VllmConfig, group: int) -> int:
    """Tokens after a boundary that a group under the EAGLE drop rule needs too."""
    if group not in config.eagle_group_ids or config.topology.specs[group].snapshot:
        return 0
    size = config.block_size(group)
    return min(_alignment(config), size) if config.partial_hits else size


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
        self._alignment = _alignment(config)
        self._units = hit_units(config)
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

    def searches(self, keys: Sequence[int], prompt: int, seen: int, hit: int) -> list[GroupSearch]:
        """Each group's side of a lookup just made, before its blocks are allocated: see `HitReasons.searches`."""
        top = int(self._units.boundaries(prompt, seen)[-1])
        return [self._search(group, keys, hit, top) for group in self._groups]

    def _search(self, group: _GroupView, keys: Sequence[int], hit: int, top: int) -> GroupSearch:
        if not self._caching or not group.shared:
            return GroupSearch(hit, NOT_SHARED if self._caching else CACHING_OFF, hit)
        if hit >= top:
            return GroupSearch(hit, WHOLE_PROMPT, hit)
        resumes, computed = group.furthest_resumed(keys, hit, top), group.computed(keys, hit, top)
        if resumes >= top:
            return GroupSearch(resumes, WHOLE_PROMPT, computed)
        reason, key = group.lacking(keys, hit, resumes + self._alignment)
        evicted = self._engine.eviction(group.index, key) if reason == EVICTED else None
        return GroupSearch(resumes, reason, computed, *(evicted or ()))

    def _reason(self, group: _GroupView, waiting: str, keys: Sequence[int], hit: int, boundary: int) -> str:
        if not group.shared:
            return NOT_SHARED
        return waiting or group.lacking(keys, hit, boundary)[0]


class _GroupView:
    """One group's side of a lookup: which blocks a request needs in order to resume at a boundary."""

    def __init__(self, config: VllmConfig, group: int, engine: MissDiagnosis, alignment: int) -> None:
        self._spec = config.topology.specs[group]
        self.index = group
        self._alignment = alignment
        self._engine = engine
        self._block = config.block_size(group)
        self._hash_block = config.hash_block_size
        self._proof = proof(config, group)
        self._sinks = -(-self._spec.sinks // self._block)
        self.shared = self._spec.prefix_cacheable
        every = range(alignment, config.max_model_len + 1, alignment) if self.shared else range(0)
        self._unneeding = [boundary for boundary in every if not self._needs_anything(boundary)]

    def furthest(self, tokens: int) -> int:
        """The furthest token to resume at: the last token is always computed; a draft's proof must be whole."""
        return min(tokens - 1, tokens // self._hash_block * self._hash_block - self._proof)

    def resumes_at(self, keys: Sequence[int], hit: int, boundary: int) -> bool:
        """True if a request could resume at `boundary`, beyond its `hit`, were this the only group."""
        lacking = self._first_lacking_sink(keys, hit, boundary), self._last_lacking(keys, hit, boundary)
        return lacking == (None, None) and self._tail(keys, boundary) == CACHED

    def resumes_somewhere(self, keys: Sequence[int], hit: int, boundaries: range) -> bool:
        """True if a request could resume at any of the `boundaries` beyond its `hit`, were this the only group."""
        lacking = self._first_lacking_sink(keys, hit, boundaries[-1])
        if lacking is not None:
            boundaries = boundaries[: bisect.bisect_right(boundaries, lacking, key=lambda n: self._whole(n).stop)]
        if not boundaries:
            return False
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

    def lacking(self, keys: Sequence[int], hit: int, boundary: int) -> tuple[str, int]:
        """The reason for which a block is missing that keeps this group from resuming at `boundary`, and its key.

        The first block it lacks of sinks, and for groups whose queries read everything; else the last, where the search
        for a window or a state begins.
        """
        sinks = [(self._absence(keys, index), self._key(keys, index)) for index in self._open_sinks(hit, boundary)]
        blocks = [(self._absence(keys, index), self._key(keys, index)) for index in self._still_open(hit, boundary)]
        absences = [*blocks, (self._tail_missing(keys, boundary), self._tail_key(keys, boundary))]
        order = absences if self._reads_all(boundary) else reversed(absences)
        return next((_REASON_OF_ABSENCE[absence], key) for absence, key in (*sinks, *order) if absence != CACHED)

    def furthest_resumed(self, keys: Sequence[int], hit: int, top: int) -> int:
        """The furthest boundary up to `top` at which a request could resume, were this the only group; else `hit`."""
        boundary, sink = top, self._first_lacking_sink(keys, hit, top)
        if sink is not None:
            boundary = ((sink + 1) * self._block - 1 - self._proof) // self._alignment * self._alignment
        while boundary > hit:
            lacking = self._last_lacking(keys, hit, boundary)
            if lacking is None and self._tail(keys, boundary) == CACHED:
                return boundary
            # A boundary fails whose needed blocks include the one that is lacking: it must end before that one does.
            most = boundary - 1 if lacking is None else (lacking + 1) * self._block - 1 - self._proof
            boundary = most // self._alignment * self._alignment
        return hit

    def computed(self, keys: Sequence[int], hit: int, top: int) -> int:
        """The furthest boundary up to `top` whose needed blocks somebody computed, cached or not; at least `hit`."""
        stop = self._whole(top).stop
        seen = self._first_never_seen(keys, hit // self._block, stop)
        if seen >= stop:
            return top
        return max(hit, ((seen + 1) * self._block - 1 - self._proof) // self._alignment * self._alignment)

    def _whole(self, boundary: int) -> range:
        """Indices of the whole blocks that must be cached for a request to resume at `boundary`, beside the sinks'."""
        return range(self._spec.readable(boundary).start // self._block, (boundary + self._proof) // self._block)

    def _needs_anything(self, boundary: int) -> bool:
        """True if a request needs more than the sinks to resume at `boundary`."""
        return bool(self._whole(boundary)) or (boundary + self._proof) % self._block != 0

    def _tail(self, keys: Sequence[int], boundary: int) -> str:
        """State of the partly filled block at the end of what is needed; `cached` if none is needed."""
        whole = (boundary + self._proof) % self._block == 0
        return CACHED if whole else self._engine.absence(self.index, self._tail_key(keys, boundary))

    def _tail_key(self, keys: Sequence[int], boundary: int) -> int:
        return keys[(boundary + self._proof) // self._hash_block - 1]

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

    def _open_sinks(self, hit: int, boundary: int) -> range:
        """The sinks' blocks that are needed at `boundary` and that the hit itself does not show to be cached."""
        return range(hit // self._block, min(self._sinks, self._whole(boundary).stop))

    def _first_lacking_sink(self, keys: Sequence[int], hit: int, boundary: int) -> int | None:
        """Index of the first of the sinks' blocks that is needed at `boundary` and not cached; None for none."""
        blocks = self._open_sinks(hit, boundary)
        return next((index for index in blocks if self._absence(keys, index) != CACHED), None)

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
        return self._engine.absence(self.index, self._key(keys, index))

    def _key(self, keys: Sequence[int], index: int) -> int:
        return keys[(index + 1) * self._block // self._hash_block - 1]

"""State of the blocks that a request would need in order to resume beyond its hit, group by group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from hkv.dialects.vllm.config import VllmConfig
from hkv.replay.reasons import (
    CACHING_OFF,
    EVICTED,
    HAD,
    NEVER_SEEN,
    NOT_RETAINED,
    NOT_SHARED,
    NOTHING,
    RETIRED,
    HitUnits,
    Lacking,
)

REASONS = (NOTHING, HAD, NEVER_SEEN, EVICTED, RETIRED, NOT_RETAINED, NOT_SHARED, CACHING_OFF)
"""Every reason, in the order in which tables list them. `docs/replay.md` explains each."""

CACHED = "cached"

OF_ABSENCE = {
    CACHED: HAD,
    "never seen": NEVER_SEEN,
    "evicted": EVICTED,
    "retired": RETIRED,
    "not retained": NOT_RETAINED,
}
"""Reasons by what `MissDiagnosis.absence` says."""


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


def hit_units(config: VllmConfig) -> HitUnits:
    """The units in which a cache under vLLM 0.33's rules finds prefixes."""
    groups = [group for group in range(len(config.topology.groups)) if config.topology.specs[group].prefix_cacheable]
    most = max((proof(config, group) for group in groups), default=0)
    return HitUnits(config.hash_block_size, _alignment(config), most, bool(groups))


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
    """Tells what groups lack, given an engine that can be asked."""

    def __init__(self, config: VllmConfig, engine: MissDiagnosis) -> None:
        self._caching = config.caching
        self._groups = [_GroupView(config, group, engine) for group in range(len(config.topology.groups))]

    def lacking(self, keys: Sequence[int], hit: int, asked: int) -> tuple[int, list[Lacking]]:
        """State of each group at the furthest boundary that was computed: see `HitReasons.lacking`."""
        if not self._caching:
            return hit, [Lacking(CACHING_OFF) for _ in self._groups]
        sharing = [group for group in self._groups if group.shared] if hit < asked else []
        boundary = min((group.computed(keys, hit, asked) for group in sharing), default=max(hit, asked))
        return boundary, [group.lacking(keys, hit, boundary) for group in self._groups]


class _GroupView:
    """One group: which blocks a request needs in order to resume at a boundary."""

    def __init__(self, config: VllmConfig, group: int, engine: MissDiagnosis) -> None:
        self._spec = config.topology.specs[group]
        self._index = group
        self._alignment = _alignment(config)
        self._engine = engine
        self._block = config.block_size(group)
        self._hash_block = config.hash_block_size
        self._proof = proof(config, group)
        self._sinks = -(-self._spec.sinks // self._block)
        self.shared = self._spec.prefix_cacheable

    def lacking(self, keys: Sequence[int], hit: int, boundary: int) -> Lacking:
        """The block that is missing and keeps this group from resuming at `boundary`.

        The first block it lacks of sinks, and for groups whose queries read everything; else the last, where the search
        for a window or a state begins.
        """
        if boundary == hit or not self.shared:
            return Lacking(NOTHING if self.shared else NOT_SHARED)
        for absence, key in self._absences(keys, hit, boundary):
            if absence != CACHED:
                evicted = self._engine.eviction(self._index, key) if absence == "evicted" else None
                return Lacking(OF_ABSENCE[absence], *(evicted or ()))
        return Lacking(HAD)

    def computed(self, keys: Sequence[int], hit: int, top: int) -> int:
        """The furthest boundary up to `top` whose needed blocks somebody computed, cached or not; at least `hit`.

        Blocks are computed in order, so that all after one that was never seen were not either.
        """
        start, stop = hit // self._block, self._whole(top).stop
        seen, end = start, stop
        while seen < end:
            middle = (seen + end) // 2
            if self._absence(keys, middle) == "never seen":
                end = middle
            else:
                seen = middle + 1
        if seen >= stop:
            return top
        return max(hit, ((seen + 1) * self._block - 1 - self._proof) // self._alignment * self._alignment)

    def _absences(self, keys: Sequence[int], hit: int, boundary: int) -> Iterator[tuple[str, int]]:
        """States and keys of what is needed at `boundary` and the hit does not show to be there, in search order."""
        blocks = self._whole(boundary)
        for index in range(hit // self._block, min(self._sinks, blocks.stop)):
            yield self._absence(keys, index), self._key(keys, index)
        if not self._spec.snapshot and self._spec.readable(boundary).start == 0:
            for index in range(max(blocks.start, hit // self._block), blocks.stop):
                yield self._absence(keys, index), self._key(keys, index)
            yield self._tail(keys, boundary)
            return
        yield self._tail(keys, boundary)
        for index in reversed(blocks):
            yield self._absence(keys, index), self._key(keys, index)

    def _whole(self, boundary: int) -> range:
        """Indices of the whole blocks that must be cached for a request to resume at `boundary`, beside the sinks'."""
        return range(self._spec.readable(boundary).start // self._block, (boundary + self._proof) // self._block)

    def _tail(self, keys: Sequence[int], boundary: int) -> tuple[str, int]:
        """State and key of the partly filled block at the end of what is needed; `cached` if none is needed.

        Where nobody had it, and a block that reaches further is known, the boundary within that was not retained.
        """
        if (boundary + self._proof) % self._block == 0:
            return CACHED, -1
        key, index = keys[(boundary + self._proof) // self._hash_block - 1], (boundary + self._proof) // self._block
        absence = self._engine.absence(self._index, key)
        known = (index + 1) * self._block // self._hash_block <= len(keys)
        if absence == "never seen" and known and self._absence(keys, index) != "never seen":
            absence = "not retained"
        return absence, key

    def _absence(self, keys: Sequence[int], index: int) -> str:
        return self._engine.absence(self._index, self._key(keys, index))

    def _key(self, keys: Sequence[int], index: int) -> int:
        return keys[(index + 1) * self._block // self._hash_block - 1]

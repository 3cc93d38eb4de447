"""The schedule of a replay under vLLM 0.33's rules, in which prompts are computed in chunks, and why its hits ended.

`docs/replay.md` defines both.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.engines.engine import KeyedEngine
from hkv.dialects.vllm.log.structs import AllocateOp, CacheState, Hit
from hkv.replay.observed import (
    CACHING_OFF,
    EVICTED,
    HAD,
    NEVER_SEEN,
    NOT_RETAINED,
    NOT_SHARED,
    NOTHING,
    RETIRED,
    HitUnits,
    MissReason,
    OccupancyKind,
    Sampling,
)
from hkv.replay.schedule import Arrival, LiveRequest, Recorder, Refusal, Schedule, StepLoop


class Replay(StepLoop):
    """Drives an engine through a trace, step by step, as vLLM 0.33's `Scheduler.schedule` would."""

    def __init__(
        self,
        engine: KeyedEngine,
        schedule: Schedule,
        chunking: Chunking,
        arrivals: Iterable[Arrival],
        observer: Recorder,
        sampling: Sampling | None = None,
        groups: int = 0,
    ) -> None:
        super().__init__(engine, schedule, arrivals, observer)
        self._sampling, self._groups, self._done = sampling, groups, 0
        self._chunking = chunking

    def left(self) -> dict[str, Any]:
        return {**super().left(), "occupancy": None if self._sampling is None else self._sampling.taken()}

    def _request(self, live: LiveRequest) -> None:
        self._engine.request_keyed(live.id, live.arrival.prompt, live.keys)

    def _begin(self) -> None:
        self._engine.step()

    def _ended(self, step: int) -> None:
        self._done += 1
        if self._sampling is not None and self._sampling.due(self._done):
            self._sampling.add(step, of_answer(self._engine.state(), self._groups))

    def _planned(self) -> None:
        if self._chunking.hash_block_size:
            self._engine.copies()

    def _available(self) -> int:
        return self._engine.num_free()

    def _advance(self, live: LiveRequest, tokens: int) -> None:
        self._engine.advance(live.id, tokens)

    def _tokens(self, live: LiveRequest, budget: int) -> int:
        return self._chunking.tokens(live.arrival.prompt, live.tokens, live.shared_boundary, live.computed, budget)

    def _grow(self, live: LiveRequest, new: int) -> bool:
        return self._engine.allocate(self._operation(live, new)).blocks is not None

    def _free(self, live: LiveRequest, *, finished: bool) -> None:
        self._engine.free(live.id)

    def _drop(self, live: LiveRequest) -> None:
        self._engine.drop(live.id)

    def _extend(self, live: LiveRequest, tokens: int) -> None:
        self._engine.extend(live.id, tokens)

    def _admit(self, live: LiveRequest, budget: int) -> tuple[int, int] | Refusal:
        hit = self._engine.lookup(live.id)
        live.shared_boundary = hit.shared_prefix
        new = self._chunking.tokens(live.arrival.prompt, live.tokens, live.shared_boundary, hit.hit, budget)
        if not new:
            return Refusal.LATER
        self._observer.looked_up(live, hit.hit)
        if self._engine.allocate(self._operation(live, new, hit)).blocks is None:
            return Refusal.PUT_OFF
        return hit.hit, new

    def _operation(self, live: LiveRequest, new: int, hit: Hit | None = None) -> AllocateOp:
        return AllocateOp(
            id=live.id,
            new=new,
            hit=0 if hit is None else hit.hit,
            lookahead=self._schedule.lookahead,
            external=0,
            delay=False,
            must_fit=hit is not None,
            reserved=0,
            in_flight=0,
            shared_prefix=None if hit is None else hit.shared_prefix,
        )


# End of a request's tokens in one step: at its last token, at the step's budget, or where a state must be kept.


@dataclasses.dataclass(frozen=True)
class Chunking:
    """Cuts a request's tokens into chunks, one a step (vLLM 0.33 `Scheduler._mamba_block_aligned_split`).

    Attributes:
      block_size: tokens between two states that recurrent groups can keep, or 0 when there are none to keep.
      eagle: whether the EAGLE drop rule is on: the last block after a hit cannot be trusted.
      hash_block_size: with sub-block hits, tokens between two boundaries where a prompt's last state is kept; else 0.
    """

    step_tokens: int
    block_size: int = 0
    eagle: bool = False
    hash_block_size: int = 0

    @classmethod
    def of(cls, config: VllmConfig, step_tokens: int) -> Chunking:
        """The chunking that a configuration asks for."""
        recurrent = [spec.block_size for spec in config.topology.specs if spec.snapshot]
        keep = math.lcm(*recurrent) if recurrent and config.caching else 0
        fine = config.hash_block_size if config.partial_hits else 0
        return cls(step_tokens, keep, config.uses_eagle, fine)

    def tokens(self, prompt: int, tokens: int, shared_boundary: int, start: int, budget: int) -> int:
        """Tokens to compute next, from `start` on, at most `budget`. 0 when the budget does not reach the next stop.

        A request's prompt and all its tokens, and the shared prefix of its lookup, as `LiveRequest` has them.
        """
        return self.cut(prompt, tokens, shared_boundary, start, min(tokens, start + budget))

    def cut(self, prompt: int, tokens: int, shared_boundary: int, start: int, end: int) -> int:
        """Tokens to compute next, from `start` on, of those up to `end`, drafts among them."""
        if self.block_size and start < max(prompt, tokens - 1):
            end = self._last_stop(prompt, tokens, shared_boundary, start, end)
        return max(end - start, 0)

    def _last_stop(self, prompt: int, tokens: int, shared_boundary: int, start: int, end: int) -> int:
        """States are kept where chunks end: chunks end on block boundaries, and never run past one that is needed."""
        size = self.block_size
        if end < max(prompt, tokens - 1):
            aligned = end // size * size
            if aligned > start or size <= self.step_tokens:
                end = aligned
        last = self._last_kept(tokens, size)
        stops = [last]
        if start % size:
            stops.append((start // size + 1) * size)
        if start < shared_boundary < end:
            stops.append(start + (shared_boundary - start) // size * size)
        if self.hash_block_size:
            tail = self._last_kept(prompt, self.hash_block_size)
            if last < tail < prompt:
                stops.append(tail)
        return min((stop for stop in stops if start < stop < end), default=end)

    def _last_kept(self, tokens: int, size: int) -> int:
        """The last multiple of `size` whose state a later request with these tokens can resume from."""
        return max(0, tokens // size * size - size if self.eagle else (tokens - 1) // size * size)


# Blocks of each group in a cache under vLLM 0.33's rules, counted in the state of any engine.


def of_answer(state: CacheState, groups: int) -> np.ndarray:
    """Blocks by `OccupancyKind` and group, int64[3, groups], in what an engine says of its state."""
    found = np.zeros((len(OccupancyKind), groups), np.int64)
    held = {int(block) for block in state.refs}
    for group in range(groups):
        found[OccupancyKind.HELD, group] = len(
            held.intersection(block for rows in state.rows.values() for block in rows[group])
        )
    for block, (group, _, _) in state.cached.items():
        found[OccupancyKind.CACHED, group] += 1
        found[OccupancyKind.EVICTABLE, group] += int(block) not in held
    return found


# State of the blocks that a request would need in order to resume beyond its hit, group by group.

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

    def miss_reasons(self, keys: Sequence[int], hit: int, asked: int) -> tuple[int, list[MissReason]]:
        """State of each group at the furthest boundary that was computed: see `HitReasons.miss_reasons`."""
        if not self._caching:
            return hit, [MissReason(CACHING_OFF) for _ in self._groups]
        sharing = [group for group in self._groups if group.shared] if hit < asked else []
        boundary = min((group.computed(keys, hit, asked) for group in sharing), default=max(hit, asked))
        return boundary, [group.miss_reason(keys, hit, boundary) for group in self._groups]


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

    def miss_reason(self, keys: Sequence[int], hit: int, boundary: int) -> MissReason:
        """The block that is missing and keeps this group from resuming at `boundary`.

        The first block it lacks of sinks, and for groups whose queries read everything; else the last, where the search
        for a window or a state begins.
        """
        if boundary == hit or not self.shared:
            return MissReason(NOTHING if self.shared else NOT_SHARED)
        for absence, key in self._absences(keys, hit, boundary):
            if absence != CACHED:
                evicted = self._engine.eviction(self._index, key) if absence == "evicted" else None
                return MissReason(OF_ABSENCE[absence], *(evicted or ()))
        return MissReason(HAD)

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
        """Indices of the whole blocks that must be cached for a request to resume at `boundary`, besides the sinks'."""
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

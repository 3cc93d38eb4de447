"""A cache with a second tier, for a replay to study: its engines, what changes it, what a replay says of it.

`tiered_replay` drives it as vLLM 0.33's schedule with offloading would, `drafted` with a draft's tokens.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.offload.config import ALL_OR_NOTHING, OWN_HEAD, OffloadConfig, chunk_bytes
from hkv.dialects.vllm.offload.found_again import warnings
from hkv.dialects.vllm.schedule.drafted import DraftedReplay
from hkv.dialects.vllm.schedule.run import VllmReplayedCache, header
from hkv.dialects.vllm.schedule.schedule import Diagnosis
from hkv.dialects.vllm.schedule.tier import Tier
from hkv.dialects.vllm.schedule.tiered_replay import TieredReplay, no_way_out
from hkv.errors import ConfigError, EngineFailure
from hkv.limits import MAX_BLOCKS, counted
from hkv.replay import dispatches
from hkv.replay.agreement import compare, compare_outcomes
from hkv.replay.optimal import BoundedPool
from hkv.replay.run import COMPILED, REFERENCE, Outcome, Progress, ReplayedCache
from hkv.replay.schedule import Arrival, Recorder, Schedule

if TYPE_CHECKING:
    from hkv.dialects.vllm.schedule.tier_dispatches import TierReplay

ENDLESS = "A tier that evicts nothing"
"""Name of the change to a tier that has room for whatever it is offered."""

ALONE = "No second tier"
"""Name of the change that leaves the tier out."""

MENDED = "Offloading without vLLM's defects"
"""Name of the change that takes those away that `hkv.dialects.vllm.offload.config.BUGS` names."""


class TieredCache(VllmReplayedCache):
    """A cache with a second tier, for a replay to study."""

    def __init__(self, config: VllmConfig, tier: Tier) -> None:
        super().__init__(config, tier.chunk_bytes)
        self.tier = tier
        # Most hits that any choice of evictions could find: content is on the GPU or in the tier, which runs nothing.
        chunks = tier.config.num_chunks
        self.pools = (BoundedPool(self.blocks + chunks, config.topology.specs, reserve=chunks),)
        self.finer = self.hit_units.unit - 1

    def changed(self, tokens: int, requests: int, schedule: Schedule) -> Mapping[str, ReplayedCache]:
        config, sizes = self.tier.config, self.config.block_sizes
        needed = 2 * sum(tokens // size + 2 * requests for size in sizes)  # LMCache keeps a fifth free
        chunks = min(max(needed, config.num_chunks), MAX_BLOCKS)
        endless = self.with_tier(dataclasses.replace(config, num_chunks=chunks))
        alone = VllmReplayedCache(dataclasses.replace(self.config, offloads=False), self.block_bytes)
        found = {ENDLESS: endless.made_by(**self.resized(endless)), ALONE: alone.made_by(offload=0)}
        if config.bugs:
            mended = self.with_tier(dataclasses.replace(config, bugs=frozenset()))
            found[MENDED] = mended.made_by(offload_defects=False)
        return {**super().changed(tokens, requests, schedule), **found}

    def with_config(self, config: VllmConfig) -> TieredCache:
        finer = self.config.hash_block_size // config.hash_block_size
        tier = dataclasses.replace(self.tier.config, cache=config, num_chunks=self.tier.config.num_chunks * finer)
        return self.with_tier(tier)

    def with_tier(self, config: OffloadConfig) -> TieredCache:
        """The same cache with another tier, which is as fast."""
        return TieredCache(config.cache, dataclasses.replace(self.tier, config=config))

    def sizes(self) -> Mapping[str, int]:
        chunks, size = self.tier.config.num_chunks, self.tier.chunk_bytes
        return {**super().sizes(), "offload": chunks * (chunk_bytes(size, self.tier.copies, 1) if size else 1)}

    def warnings(self, longest: int) -> Sequence[str]:
        config = self.tier.config  # the replay's own pool has vLLM's ways with room, whatever the defects
        return warnings(dataclasses.replace(config, bugs=config.bugs | {OWN_HEAD, ALL_OR_NOTHING}), longest)

    def require_compiled(self) -> None:
        from hkv.dialects.vllm.schedule import tier_dispatches

        super().require_compiled()
        tier_dispatches.require(self.tier.config)

    def compiled(self, schedule: Schedule, coming: Sequence[Arrival], check: bool, progress: Progress) -> Outcome:
        self.require_compiled()
        prepared, factor = dispatches.incoming(coming, schedule.max_model_len), 1
        while True:
            running = self._begun(schedule, prepared, check, factor)
            started = time.perf_counter()
            try:
                steps = running.run((lambda: None) if check else progress, self.tells, self.asks)
            except EngineFailure:
                if running.blocked is not None:
                    raise no_way_out(self.config.num_blocks, running.blocked) from None
                if not running.overflowed:
                    raise
                factor *= 2  # more requests waited for loads, or more stores went on, than there was room for
                continue
            outcome = self.ran(running, schedule, steps, time.perf_counter() - started)
            if check:
                again = [dataclasses.replace(arrival, keys=prepared.keys_of(arrival.index)) for arrival in coming]
                self.verify(running, outcome, schedule, again, progress)
            return outcome

    def _begun(self, schedule: Schedule, prepared: Any, check: bool, factor: int) -> TierReplay:
        from hkv.dialects.vllm.schedule import tier_dispatches

        largest = dataclasses.replace(self.config, num_blocks=max(self.config.num_blocks, self.room))
        sizes = tier_dispatches.sizes_of(largest, schedule, prepared, factor)
        more = {"diagnose": self.diagnoses or check, "sampling": self._samples()}
        return tier_dispatches.TierReplay(
            self.tier, schedule, prepared, sizes=sizes, jobs=factor * tier_dispatches.JOBS, **more
        )

    def verify(
        self,
        running: Any,
        outcome: Outcome,
        schedule: Schedule,
        coming: Sequence[Arrival],
        progress: Progress = lambda: None,
    ) -> None:
        names, reference = (COMPILED, REFERENCE), NumpyEngine(header(self.config))
        recorder = Recorder(self.config.num_blocks, Diagnosis(self.config, reference.manager), progress)
        loop = TieredReplay(self.tier, reference, schedule, coming, recorder, self._samples(), len(self.groups))
        other = self.ran(loop, schedule, loop.run(), 0.0)
        compare_outcomes(outcome, other, names)
        compare("order of eviction", running.order(), loop.order(), names)
        self.compare_ends(running, reference, names)

    def loop(
        self, schedule: Schedule, coming: Iterable[Arrival], driven: Any, oracle: Any, progress: Progress
    ) -> TieredReplay:
        if not isinstance(driven, NumpyEngine):
            raise ConfigError("engine", type(driven).__name__, f"{REFERENCE}: with a second tier")
        recorder = Recorder(self.config.num_blocks, Diagnosis(self.config, driven.manager), progress)
        kind = DraftedReplay if self.tier.config.drafts else TieredReplay
        return kind(self.tier, driven, schedule, coming, recorder, self._samples(), len(self.groups))

    def rows(self, totals: Mapping[str, Any]) -> Sequence[tuple[str, Any, str]]:
        size = self.tier.chunk_bytes * self.tier.copies

        def amount(chunks: int) -> str:
            return f"{chunks * size / 2**30:,.1f} GiB" if size else "chunks"

        hits, loaded = totals["hit_tokens"], totals["loaded_tokens"]
        prompt = max(totals["prompt_tokens"], 1)
        stored, read = totals["tier_stored"], totals["tier_read"]
        waited, loading = (counted(totals[f"tier_{each}_steps"], "step") for each in ("wait", "load"))
        rows = [
            ("hit on the GPU", f"{(hits - loaded) / prompt:.2%}", f"{hits - loaded:,} tokens"),
            ("hit in the tier", f"{loaded / prompt:.2%}", f"{loaded:,} tokens, loaded"),
            ("tier, peak", totals["tier_peak"], f"of {counted(self.tier.config.num_chunks, 'chunk')}"),
            ("stored", stored, amount(stored)),
            ("loaded", totals["tier_loaded"], amount(totals["tier_loaded"])),
            ("stored, never read", stored - read, amount(stored - read)),
            ("evicted from the tier", totals["tier_evicted"], amount(totals["tier_evicted"])),
            ("stores without room", totals["tier_refused"], "offered again with the next step"),
            ("stores flushed", totals["tier_flushed"], "their blocks were handed out, and a step waited"),
            ("waited for chunks", totals["tier_waits"], f"requests, {waited} together"),
            ("waited for loads", totals["tier_loads"], f"requests, {loading} together"),
        ]
        if (slower := totals["tier_slower_loads"]) is not None:
            saved = f"{totals['tier_saved_steps']:,.0f} steps of prefill saved less their loads"
            rows.append(("loads slower", slower, f"than computing again; {saved}"))
        return rows

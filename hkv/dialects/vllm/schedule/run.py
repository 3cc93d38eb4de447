"""A replay under vLLM 0.33's rules: its cache, its engines, and the compiled schedule."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hkv.contract.answer import EngineFactory
from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.config import VllmConfig, default_block_sizes, default_partial_hits
from hkv.dialects.vllm.engines.engine import KeyedEngine
from hkv.dialects.vllm.log.configuration import to_header
from hkv.dialects.vllm.log.structs import AllocateOp, Allocation, Header, Hit
from hkv.dialects.vllm.schedule.schedule import REASONS, Chunking, Diagnosis, MissDiagnosis, Replay, hit_units
from hkv.errors import ConfigError
from hkv.limits import MAX_BLOCKS
from hkv.model.topology import Topology
from hkv.replay.agreement import Compared, Lockstep, Part, compare, compare_outcomes
from hkv.replay.observed import Sampling
from hkv.replay.optimal import BoundedPool
from hkv.replay.run import COMPILED, EVICTS_NOTHING, REFERENCE, Outcome, Progress, ReplayedCache
from hkv.replay.schedule import Arrival, Recorder, Schedule
from hkv.spec import LayerSpec, retained_sparsely, spec_to_text


def cache_config(
    specs: Sequence[LayerSpec],
    num_blocks: int,
    schedule: Schedule,
    *,
    caching: bool = True,
    eagle: Sequence[int] | None = None,
    retention_interval: int | None = None,
) -> VllmConfig:
    """The cache that a replay studies, configured as vLLM 0.33 would.

    Block sizes follow `resolve_kv_cache_block_sizes`; tokens in flight are those of one step; without caching a
    recurrent group keeps one block a request, as vLLM 0.33 then sets `mamba_block_size` to the longest request.
    No `eagle` groups are all of them, None is no draft; `retention_interval` None is dense.
    """
    if not specs:
        raise ConfigError("groups", list(specs), "at least one group")
    if not caching:
        grid = math.lcm(*(spec.block_size for spec in specs))
        whole = -(-schedule.max_model_len // grid) * grid
        specs = [spec.with_block_size(whole) if spec.snapshot else spec for spec in specs]
    topology = Topology.of_specs(specs, eagle or ())
    scheduler_block, hash_block = default_block_sizes(topology)
    return VllmConfig(
        topology=topology,
        num_blocks=num_blocks,
        hash_block_size=hash_block,
        scheduler_block_size=scheduler_block,
        caching=caching,
        eagle=eagle is not None,
        retention_interval=retention_interval,
        partial_hits=default_partial_hits(specs, hash_block, caching=caching),
        max_model_len=schedule.max_model_len,
        max_in_flight_tokens=min(schedule.step_tokens, schedule.max_model_len),
    )


def with_match_unit(config: VllmConfig, unit: int) -> VllmConfig:
    """The same cache with prefixes of so many tokens hashed (`prefix_match_unit`), inside whose blocks hits may end."""
    sizes = config.block_sizes
    if any(size % unit for size in sizes) or (len(sizes) == 1 and unit != sizes[0]):
        expected = f"a divisor of every group's block, {list(sizes)}, and of a group alone its block"
        raise ConfigError("prefix_match_unit", unit, expected)
    partial = default_partial_hits(config.topology.specs, unit, caching=config.caching)
    return dataclasses.replace(config, hash_block_size=unit, partial_hits=partial)


def header(config: VllmConfig) -> Header:
    """The log header of a replay's cache."""
    return to_header(config, "eagle" if config.eagle else "core", 3 if config.offloads else 2)


class VllmReplayedCache(ReplayedCache):
    """A cache under vLLM 0.33's rules, for a replay to study.

    `block_bytes` are those of a block on each GPU, where a plan says it: `--memory` has room for blocks then.
    """

    config: VllmConfig
    reasons = REASONS

    def __init__(self, config: VllmConfig, block_bytes: int = 0) -> None:
        for index, spec in enumerate(config.topology.specs):
            if spec.encoder_tokens:
                expected = "a kind of a request's own tokens: a trace says nothing of encoders"
                raise ConfigError(f"groups[{index}].kind", spec.kind, expected)
            if kinds.layer(spec).replays:
                expected = "a kind that needs no tokens computed again: a replay computes each once"
                raise ConfigError(f"groups[{index}].kind", spec.kind, expected)
        pools = (BoundedPool(config.num_blocks - 1, config.topology.specs),)
        settings = {"reuses": config.caching, "eagle_groups": config.eagle_group_ids}
        super().__init__(config, config.topology.groups, pools, hit_units(config), **settings)
        self.block_bytes = block_bytes

    def changed(self, tokens: int, requests: int, schedule: Schedule) -> Mapping[str, ReplayedCache]:
        config = self.config
        if not config.caching:
            return {}
        needed = 2 + sum(_blocks_needed(config, group, tokens, requests, schedule) for group in range(len(self.groups)))
        enough = max(min(needed, _most_blocks(config)), config.num_blocks)
        endless = self.with_config(dataclasses.replace(config, num_blocks=enough))
        found = {EVICTS_NOTHING: endless.made_by(**self.resized(endless))}
        if config.retention_interval is not None:
            dense = self.with_config(dataclasses.replace(config, retention_interval=None))
            found["Dense retention"] = dense.made_by(retention="dense")
        factor = config.hash_block_size
        blocks = (config.num_blocks - 1) * factor + 1
        finest = not self.block_bytes and not any(spec.snapshot for spec in config.topology.specs)
        if finest and factor > 1 and blocks <= MAX_BLOCKS:  # of a model, no kernel has such blocks
            finer = _finer(config, factor, blocks)
            sizes, groups = ", ".join(map(str, finer.block_sizes)), ",".join(map(spec_to_text, finer.topology.specs))
            made = self.with_config(finer)
            found[f"Blocks of {sizes}"] = made.made_by(groups=groups, prefix_match_unit=1, **self.resized(made))
        return found

    def with_config(self, config: VllmConfig) -> VllmReplayedCache:
        """The same cache, configured in another way."""
        return VllmReplayedCache(config, self.block_bytes)

    def sizes(self) -> Mapping[str, int]:
        """Options of `hkv replay` that say how large it is."""
        blocks = self.config.num_blocks
        return {"memory": blocks * self.block_bytes} if self.block_bytes else {"num_blocks": blocks}

    def resized(self, other: VllmReplayedCache) -> Mapping[str, int]:
        """Those of them that make another cache's size of its own; all, where that is as large."""
        return dict(sorted(other.sizes().items() - self.sizes().items())) or other.sizes()

    def engine(self, name: str, make: EngineFactory) -> KeyedEngine:
        engine = make(header(self.config))
        if not isinstance(engine, KeyedEngine):
            raise ConfigError("engine", name, "an engine that takes requests by their prefix keys")
        return engine

    def lockstep(self, engine: KeyedEngine, reference: KeyedEngine, names: tuple[str, str]) -> Any:
        return LockstepEngine(engine, reference, names)

    def loop(
        self, schedule: Schedule, coming: Iterable[Arrival], driven: KeyedEngine, oracle: Any, progress: Progress
    ) -> Replay:
        diagnosis = Diagnosis(self.config, oracle) if isinstance(oracle, MissDiagnosis) else None
        recorder = Recorder(self.config.num_blocks, diagnosis, progress)
        chunking = Chunking.of(self.config, schedule.step_tokens)
        return Replay(driven, schedule, chunking, coming, recorder, self._samples(), len(self.groups))

    def _samples(self) -> Sampling | None:
        return Sampling(self.sampling) if self.sampling else None

    def require_compiled(self) -> None:
        from hkv.dialects.vllm.rules.parameters import of_config

        of_config(self.config, len(self.groups) + 1)

    def begun(self, schedule: Schedule, prepared: Any, check: bool) -> Any:
        from hkv.dialects.vllm.schedule import compiled

        config = self.config
        largest = dataclasses.replace(config, num_blocks=max(config.num_blocks, self.room))
        sizes = compiled.sizes_of(largest, schedule, prepared)
        room = compiled.ids_of_a_step(sizes, len(self.groups)) * 2 if check else 0
        more = {"diagnose": self.diagnoses or check, "sampling": self._samples()}
        return compiled.CompiledReplay(config, schedule, prepared, sizes=sizes, ids=room, **more)

    def verify(
        self,
        running: Any,
        outcome: Outcome,
        schedule: Schedule,
        coming: Sequence[Arrival],
        progress: Progress = lambda: None,
    ) -> None:
        """As in every dialect; by the hits and blocks of every answer, too, which the compiled replay reported."""
        from hkv.dialects.vllm.engines.numpy import NumpyEngine

        names, reference = (COMPILED, REFERENCE), self.engine(REFERENCE, NumpyEngine)
        compared = ComparedEngine(reference, np.concatenate(running.ids), names)
        other = self.plain(schedule, coming, compared, reference, progress)
        compared.check_all_compared()
        compare_outcomes(outcome, other, names)
        self.compare_ends(running, reference, names)

    def compare_ends(self, running: Any, reference: KeyedEngine, names: tuple[str, str]) -> None:
        for place, blocks in enumerate(itertools.zip_longest(running.free_queue(), reference.state().free)):
            compare(f"place {place} of the free queue at the end", *blocks, names)


def _blocks_needed(config: VllmConfig, group: int, tokens: int, requests: int, schedule: Schedule) -> int:
    """Blocks of a group that requests hold or leave behind cached at most, so that a pool that has them evicts nothing.

    A window under retention 0 leaves behind what resumes before `RESUMPTIONS` lengths; its other blocks return without
    keys, to be handed out before any that never was, so that they count only while a request runs.
    """
    spec, block = config.topology.specs[group], config.block_size(group)
    everything = tokens // block + requests
    sparse = kinds.layer(spec).seeks_run and retained_sparsely(spec) and config.retention_interval == 0
    if not sparse or config.hit_alignment % block:
        return everything
    kept = requests * RESUMPTIONS * (spec.most_read // block + 2)
    step = config.in_flight_limit + schedule.lookahead
    held = spec.most_read + kinds.layer(spec).kept_beyond
    return min(everything, kept + schedule.max_running * ((held + step) // block + 3))


RESUMPTIONS = 4
"""Lengths before which a window keeps blocks under retention 0 (`hkv.dialects.vllm.rules.retire.expected_ends`)."""


def _most_blocks(config: VllmConfig) -> int:
    """Blocks of a pool that is to be as large as possible: what describes them takes at most 4 GiB, about."""
    parts = max(config.block_sizes) // config.hash_block_size
    words = 4 + 3 * parts  # a place, references and links; a key and two links for each part
    return min(MAX_BLOCKS, 1 << ((1 << 30) // words).bit_length() - 1)


def _finer(config: VllmConfig, factor: int, num_blocks: int) -> VllmConfig:
    """The same cache in smaller blocks, as many more."""
    groups = tuple(
        dataclasses.replace(
            group, spec=group.spec.with_block_size(group.spec.block_size // factor), kernel_block_size=0
        )
        for group in config.topology.groups
    )
    return dataclasses.replace(
        config,
        topology=Topology(groups),
        num_blocks=num_blocks,
        hash_block_size=config.hash_block_size // factor,
        scheduler_block_size=config.scheduler_block_size // factor,
    )


# Engines under vLLM 0.33's rules held against each other: side by side, or one after a compiled replay.


class LockstepEngine(Lockstep):
    """Two `KeyedEngine`s side by side.

    Compared: hits and their blocks, the blocks of every allocation, refusals, free blocks, copies, resets, state.
    """

    operations = (
        *("step", "request", "request_keyed", "lookup", "allocate", "advance", "append", "extend", "commit", "free"),
        *("drop", "evict", "copies", "reset", "events", "state", "num_free"),
    )

    def _parts(self, name: str, arguments: tuple[Any, ...], mine: Any, other: Any) -> Iterator[Part]:
        fields = {"lookup": ("hit", "blocks", "shared_prefix"), "state": ("free", "refs", "rows")}.get(name, ())
        for field in fields:
            yield name, arguments[0] if arguments else "", field, getattr(mine, field), getattr(other, field)
        if name == "allocate":
            yield name, arguments[0].id, "refused", mine.blocks is None, other.blocks is None
            yield name, arguments[0].id, "blocks", mine.blocks, other.blocks
        elif name == "free":
            yield name, arguments[0], "free blocks", self._engine.num_free(), self._reference.num_free()
        elif name in WHOLE:
            yield name, "", WHOLE[name], mine, other


WHOLE = {"copies": "copies", "reset": "ok", "num_free": "free blocks"}
"""Operations whose whole answer is compared, and what it is called."""


# Holds a compiled replay against the plain schedule: the same blocks in the same order, and the same records.


class ComparedEngine(Compared):
    """A `KeyedEngine` that compares every block it finds or hands out with those that a compiled replay reported.

    `ids`: for each lookup and allocation, group after group; null blocks before a hit are left out, and before those of
    an allocation come the copies it asks for: group, block, copy. The engine says which copies are pending.
    """

    def lookup(self, id: str) -> Hit:
        """Hit that the engine finds, compared."""
        hit = self._engine.lookup(id)
        rows = [row[next((i for i, block in enumerate(row) if block), len(row)) :] for row in hit.blocks]
        self._compare("lookup", id, rows if hit.hit else [])
        return hit

    def allocate(self, operation: AllocateOp) -> Allocation:
        """Allocation that the engine makes, compared."""
        before = [len(copies) for copies in self._engine.pending_copies()]
        allocation = self._engine.allocate(operation)
        after = self._engine.pending_copies()
        new = [(group, *copy) for group, copies in enumerate(after) for copy in copies[before[group] :]]
        rows = [list(row) for row in allocation.blocks or []]
        if operation.hit:
            for group, _, _ in new:
                del rows[group][0]
        self._compare("allocate", operation.id, [*new, *rows])
        return allocation

    def _compare(self, operation: str, request: str, rows: Sequence[Sequence[int]]) -> None:
        self._number += 1
        blocks = [block for row in rows for block in row]
        theirs = self._read(len(blocks))
        if theirs != blocks:
            raise self._differ(operation, request, "blocks", theirs, blocks)

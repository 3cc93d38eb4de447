"""Replays a trace on the device: sizes, inputs, and what is left."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from hkv.dialects.vllm import kinds
from hkv.dialects.vllm import machine as cache
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.rules.parameters import CacheField, GroupField, Parameters, of_config
from hkv.dialects.vllm.rules.transitions import RUNNING
from hkv.dialects.vllm.schedule import compiled_reasons, program
from hkv.dialects.vllm.schedule.compiled_reasons import DiagnosedTrace, Resident
from hkv.dialects.vllm.schedule.diagnosis import REASONS, proof
from hkv.dialects.vllm.schedule.schedule import Chunking
from hkv.machine.operations import bucket
from hkv.replay.dispatches import STEPS, Dispatches, Incoming, rounded, trace_arrays
from hkv.replay.occupancy import Kind, Sampling
from hkv.replay.schedule import Recorder, Schedule
from hkv.replay.schedule_state import Machine
from hkv.state.state import GROUP_WORDS, REQUEST_WORDS, Buckets, Counter, Request, Row, State
from hkv.state.workspace import COPY_WORDS


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes: the cache's buckets, and further ones."""

    buckets: Buckets
    requests: int
    keys: int

    @classmethod
    def of(cls, config: VllmConfig, schedule: Schedule, trace: Incoming) -> Sizes:
        """Sizes that a replay fits, rounded up so that few executables serve many."""
        buckets = cache.buckets_for(
            config,
            requests=trace.slots(schedule.max_running),
            keys=max(1, trace.num_keys),
            tokens=trace.longest(schedule.max_model_len) + schedule.lookahead,
        )
        return cls(buckets, rounded(trace.count, 64), bucket(len(trace.keys), 4096))

    def ids_of_a_step(self, config: VllmConfig, schedule: Schedule) -> int:
        """Most block ids that one step reports: every slot's hit, every slot's new blocks and copies."""
        copies = COPY_WORDS if self.buckets.parts else 0
        return (self.buckets.requests + 1) * (2 * self.buckets.row + copies) * len(config.topology.groups)


def require_expressible(config: VllmConfig) -> None:
    """Raises for configurations whose rules the compiled schedule does not have."""
    of_config(config, len(config.topology.groups) + 1)


class CompiledReplay(Dispatches):
    """A trace, a cache and a schedule, replayed in as few dispatches as steps allow."""

    def __init__(
        self,
        config: VllmConfig,
        schedule: Schedule,
        trace: Incoming,
        *,
        sizes: Sizes | None = None,
        diagnose: bool = True,
        ids: int = 0,
        steps: int = STEPS,
        sampling: Sampling | None = None,
    ) -> None:
        require_expressible(config)
        self.config = config
        self._diagnose, self.sampling, self._done = diagnose, sampling, 0
        sizes = sizes or Sizes.of(config, schedule, trace)
        parameters, state = cache.init(config, sizes.buckets)
        np.asarray(parameters.cache)[CacheField.SILENT] = not diagnose
        self._parameters = jax.device_put(parameters)
        inputs = jax.device_put(_inputs(config, schedule, trace, sizes, parameters, diagnose))
        resident = jax.device_put(compiled_reasons.begin(state, sizes.requests, steps))
        super().__init__(trace, len(config.topology.groups), ids, resident, inputs)

    def _step(self, resident: Resident) -> tuple[Resident, jax.Array, jax.Array]:
        return program.compiled(self._room)(self._parameters, self._inputs, resident)

    def dispatch(self) -> Machine:
        sampling = self.sampling
        if sampling is None:
            return super().dispatch()
        self._change(STEPS=sampling.every - self._done % sampling.every)
        machine = super().dispatch()
        self._done += int(machine.samples)
        if machine.samples and sampling.due(self._done):
            step = int(self._samples[-1][-1, 0])
            cache = jax.tree.map(np.asarray, self._resident.cache)
            table = np.asarray(self._parameters.groups)
            sampling.add(step, of_arrays(cache, table, len(self.config.topology.groups)))
        return machine

    @property
    def evictions(self) -> int:
        """Cached blocks handed out to another use."""
        return int(np.asarray(self._resident.cache.counters)[Counter.EVICTIONS])

    def free_queue(self) -> list[int]:
        """Block ids in the free queue, the next to be handed out first."""
        return free_queue(jax.device_get(self._resident.cache))

    def recorder(self) -> Recorder:
        """Everything that happened, as the plain schedule's observer would have recorded it; reasons if asked for."""
        recorder = Recorder(self.config.num_blocks, None, lambda: None)
        self._record(recorder, REASONS if self._diagnose else ())
        return recorder


def _inputs(
    config: VllmConfig, schedule: Schedule, trace: Incoming, sizes: Sizes, parameters: Parameters, diagnose: bool
) -> DiagnosedTrace:
    chunking = Chunking.of(config, schedule.step_tokens)
    arrays = trace_arrays(
        schedule,
        trace,
        sizes.requests,
        sizes.keys,
        kept_block=chunking.block_size,
        kept_eagle=chunking.eagle,
        kept_hash=chunking.hash_block_size,
        diagnose=diagnose,
    )
    return DiagnosedTrace(*arrays, diagnosed(config, parameters))  # type: ignore[arg-type]


def diagnosed(config: VllmConfig, parameters: Parameters) -> np.ndarray:
    """`Parameters.groups` with a draft's proof, in tokens, for `EAGLE`, and for `REACH` what queries read."""
    groups = np.array(parameters.groups)
    for group, spec in enumerate(config.topology.specs):
        groups[group, GroupField.EAGLE] = proof(config, group)
        groups[group, GroupField.REACH] -= kinds.layer(spec).kept_beyond
    return groups


def free_queue(state: State) -> list[int]:
    """Block ids in the free queue of a state on the host, the next to be handed out first."""
    head, tail = int(state.counters[Counter.HEAD]), int(state.counters[Counter.TAIL])
    ring = len(state.queue) - 1
    places = np.arange(head, tail, dtype=np.int64) % ring
    blocks = np.asarray(state.queue)[places]
    return blocks[blocks != 0].tolist()


def of_arrays(state: State, table: np.ndarray, groups: int) -> np.ndarray:
    """Blocks by `Kind` and group, int64[3, groups], in the arrays of a compiled cache between two steps."""
    sinks, members = table[:, GroupField.SINKS] > 0, table[:, GroupField.MEMBER]
    pool = slice(1, state.blocks.shape[0] - 1)
    references, keys = state.blocks[pool], state.keys[pool, : 1 + state.buckets.parts]
    group_of = np.full(state.blocks.shape[0], groups)
    for slot in np.flatnonzero(state.requests[:, Request.LIVE] == RUNNING):
        for group in range(groups):
            base = REQUEST_WORDS + GROUP_WORDS * group
            length, first = (int(state.requests[slot, base + field]) for field in (Row.LENGTH, Row.FIRST))
            group_of[state.rows[slot, group, 0 if sinks[group] else first : length]] = group
    group_of = group_of[pool]
    entries = (keys[:, 0] >> 2) - 1
    for part in range(1, keys.shape[1]):
        entries = np.where(entries < 0, keys[:, part] - 1, entries)
    cached = entries >= 0
    group_of[cached] = members[entries[cached] % state.table.shape[1]]
    held = references < 0
    chosen = {Kind.HELD: held, Kind.CACHED: cached, Kind.EVICTABLE: cached & ~held}
    return np.stack([np.bincount(group_of[chosen[kind]], minlength=groups + 1)[:groups] for kind in Kind])

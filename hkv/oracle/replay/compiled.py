"""Replays a trace on the device: sizes, keys, dispatches, and what they leave as a `Recorder`."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from hkv import cache
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.parameters import GroupField, Parameters, of_config
from hkv.errors import ConfigError, EngineFailure
from hkv.oracle.replay import compiled_state, program
from hkv.oracle.replay.chunking import Chunking
from hkv.oracle.replay.compiled_state import FATE, Ending, Fate, Machine, Mode, Number, Resident, Trace
from hkv.oracle.replay.diagnosis import REASONS
from hkv.oracle.replay.record import FINISHED, NEVER_FITS, TOO_LONG, Recorder, RequestRecord, StepRecords
from hkv.oracle.replay.schedule import Arrival, Schedule
from hkv.spec import SlidingWindow
from hkv.state.state import Buckets, Counter, State
from hkv.state.status import Status

STEPS = 4096
"""Steps of one dispatch."""

LATEST = 1 << 29
"""Steps that a replay may count to."""

OUTCOMES = {
    Ending.NONE: "",
    Ending.FINISHED: FINISHED,
    Ending.NEVER_FITS: NEVER_FITS,
    Ending.TOO_LONG: TOO_LONG,
}


@dataclasses.dataclass(frozen=True)
class Incoming:
    """A trace as arrays.

    Attributes:
      requests: int32[n + 1, 4], `hkv.oracle.replay.compiled_state.Trace.requests`.
      keys: int32[m], as in `Trace.keys`.
      ends: int64[n + 1], where each request's keys begin, and where the last ones end.
      num_keys: distinct prefix keys: all keys are below it.
    """

    requests: np.ndarray
    keys: np.ndarray
    ends: np.ndarray
    num_keys: int

    @property
    def count(self) -> int:
        """Requests of the trace."""
        return len(self.requests) - 1

    def keys_of(self, index: int) -> Callable[[], list[int]]:
        """Makes one request's keys when called; none for a request that was too long."""
        start, end = self.ends[index], self.ends[index + 1]
        return lambda: self.keys[start:end].tolist()


def incoming(arrivals: Sequence[Arrival], max_model_len: int) -> Incoming:
    """A trace as arrays; its keys are made here, in the order of the trace, for requests that are not too long.

    Raises:
      ConfigError: a request arrives too late to be counted.
    """
    requests = np.zeros((len(arrivals) + 1, compiled_state.ARRIVING), np.int32)
    parts, num_keys = [np.zeros(0, np.int64)], 0
    ends = np.zeros(len(arrivals) + 1, np.int64)
    for index, arrival in enumerate(arrivals):
        if arrival.step >= LATEST:
            raise ConfigError("step", arrival.step, f"arrivals before step {LATEST}: a longer --step-ms")
        fits = arrival.prompt + arrival.output <= max_model_len
        keys = np.asarray(arrival.keys() if fits else (), np.int64)
        start = int(ends[index])
        requests[index] = arrival.step, arrival.prompt, arrival.output, start
        ends[index + 1] = start + len(keys)
        parts.append(keys)
        num_keys = max(num_keys, int(keys.max(initial=-1)) + 1)
    return Incoming(requests, np.concatenate(parts).astype(np.int32), ends, num_keys)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is static beside the cache's buckets.

    Attributes:
      buckets: sizes of the cache.
      requests: requests of the trace.
      keys: prefix keys of all requests together.
    """

    buckets: Buckets
    requests: int
    keys: int

    @classmethod
    def of(cls, config: VllmConfig, schedule: Schedule, trace: Incoming) -> Sizes:
        """Sizes that a replay fits, rounded up so that few executables serve many."""
        lengths = trace.requests[:-1, 1:3].astype(np.int64).sum(axis=1)
        longest = int(lengths[lengths <= schedule.max_model_len].max(initial=1)) + schedule.lookahead
        slots = min(schedule.max_running, max(1, trace.count)) + 1
        buckets = cache.buckets_for(config, requests=slots, keys=max(1, trace.num_keys), tokens=longest)
        return cls(buckets, _rounded(trace.count, 64), _rounded(len(trace.keys), 4096))

    def ids_of_a_step(self, config: VllmConfig, schedule: Schedule) -> int:
        """Most block ids that one step reports: every slot's hit and every slot's new blocks."""
        return 2 * (self.buckets.requests + 1) * self.buckets.row * len(config.topology.groups)


def require_expressible(config: VllmConfig) -> None:
    """Raises for configurations whose rules the compiled schedule does not have.

    Raises:
      ConfigError: sub-block hits, states for drafts or inside chunks, or what the compiled cache cannot do either.
    """
    if config.partial_hits:
        raise ConfigError("partial_hits", True, "False: the compiled schedule has no sub-block hits")
    for group, spec in enumerate(config.topology.specs):
        for name in ("num_speculative_blocks", "num_prefill_checkpoint_blocks"):
            if getattr(spec, name, 0):
                expected = "0: the compiled schedule has no speculative or checkpoint states"
                raise ConfigError(f"groups[{group}].{name}", getattr(spec, name), expected)
    of_config(config, len(config.topology.groups) + 1)


class CompiledReplay:
    """A trace, a cache and a schedule, replayed in as few dispatches as steps allow.

    Args:
      config: the cache.
      schedule: the numbers.
      trace: the requests.
      sizes: static sizes, to share executables; by default those that fit.
      diagnose: whether to find out why hits ended.
      ids: room for the block ids that are reported; 0: none are.
      steps: most steps of a dispatch.

    Attributes:
      ids: what was reported, in order.

    Raises:
      ConfigError: the configuration needs what the compiled schedule or cache does not have.
    """

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
    ) -> None:
        require_expressible(config)
        self.config = config
        self._schedule = schedule
        self._trace = trace
        self._room = ids
        sizes = sizes or Sizes.of(config, schedule, trace)
        parameters, state = cache.init(config, sizes.buckets)
        self._parameters = jax.device_put(parameters)
        self._inputs = jax.device_put(_inputs(config, schedule, trace, sizes, parameters, diagnose))
        self._resident = jax.device_put(compiled_state.begin(state, sizes.requests, steps))
        self._samples: list[np.ndarray] = []
        self.ids: list[np.ndarray] = []

    def dispatch(self) -> Machine:
        """Replays up to so many steps more. Returns where the schedule stands, as NumPy integers.

        Raises:
          EngineFailure: the cache refused an operation that the schedule may perform.
        """
        self._resident, ids, count = program.compiled(self._room)(self._parameters, self._inputs, self._resident)
        machine = Machine(*np.asarray(self._resident.machine))
        if machine.mode == Mode.FAILED:
            status = Status(int(machine.status)).name
            raise EngineFailure("operation", status, f"one that the schedule may perform in step {machine.step}")
        if machine.samples:
            self._samples.append(np.array(self._resident.samples[: int(machine.samples)]))
        if self._room:
            if int(count) > self._room:
                raise ConfigError("ids", self._room, f"room for the {int(count)} ids of one step")
            self.ids.append(np.array(ids[: int(count)]))
        return machine

    def run(self, progress: Callable[[], None] = lambda: None) -> int:
        """Replays the whole trace. Returns the number of the last step + 1.

        Args:
          progress: called each time a request has finished or is refused for good, a dispatch's at once.
        """
        ended = 0
        while True:
            machine = self.dispatch()
            for _ in range(ended, int(machine.ended)):
                progress()
            ended = int(machine.ended)
            if machine.mode == Mode.DONE:
                return int(machine.step)

    @property
    def resident(self) -> Resident:
        """What is on the device now."""
        return self._resident

    @property
    def fates(self) -> np.ndarray:
        """int32[requests, 8 + groups]: `Fate`, and the reasons of each request of the trace."""
        return np.asarray(self._resident.fates)[: self._trace.count, : FATE + len(self.config.topology.groups)]

    @property
    def evictions(self) -> int:
        """Cached blocks handed out to another use."""
        return int(np.asarray(self._resident.cache.counters)[Counter.EVICTIONS])

    def free_queue(self) -> list[int]:
        """Block ids in the free queue, the next to be handed out first."""
        return free_queue(jax.device_get(self._resident.cache))

    def recorder(self) -> Recorder:
        """Everything that happened, as the plain schedule's observer would have recorded it."""
        groups = len(self.config.topology.groups)
        recorder = Recorder(self.config.num_blocks, groups, None, lambda: None)
        fates = self.fates
        for index, (row, fate) in enumerate(zip(self._trace.requests.tolist(), fates.tolist(), strict=False)):
            recorder.requests[index] = RequestRecord(
                index=index,
                prompt=row[1],
                output=row[2],
                arrived=row[0],
                hit=fate[Fate.HIT],
                admitted=fate[Fate.ADMITTED],
                ended=fate[Fate.ENDED],
                outcome=OUTCOMES[Ending(fate[Fate.OUTCOME])],
                preemptions=fate[Fate.PREEMPTIONS],
                recomputed=fate[Fate.RECOMPUTED],
                recovered=fate[Fate.RECOVERED],
            )
        columns = [part.T for part in self._samples]
        names = [field.name for field in dataclasses.fields(StepRecords)]
        if columns:
            values = np.concatenate(columns, axis=1).tolist()
            recorder.steps = StepRecords(**dict(zip(names, values, strict=True)))
        admitted = fates[fates[:, Fate.ADMITTED] >= 0]
        recorder.reasons = [
            collections.Counter(REASONS[reason] for reason in admitted[:, FATE + group].tolist())
            for group in range(groups)
        ]
        return recorder


def _inputs(
    config: VllmConfig, schedule: Schedule, trace: Incoming, sizes: Sizes, parameters: Parameters, diagnose: bool
) -> Trace:
    chunking = Chunking.of(config, schedule.step_tokens)
    values: dict[Number, Any] = {
        Number.STEP_TOKENS: schedule.step_tokens,
        Number.DECODE_TOKENS: schedule.decode_tokens,
        Number.MAX_RUNNING: schedule.max_running,
        Number.LOOKAHEAD: schedule.lookahead,
        Number.MAX_MODEL_LEN: schedule.max_model_len,
        Number.CLOSED_LOOP: schedule.closed_loop,
        Number.REQUESTS: trace.count,
        Number.KEPT_BLOCK: chunking.block_size,
        Number.KEPT_EAGLE: chunking.eagle,
        Number.DIAGNOSE: diagnose,
    }
    numbers = np.zeros(len(Number), np.int32)
    for number, value in values.items():
        numbers[number] = min(int(value), LATEST)
    requests = np.zeros((sizes.requests + 1, compiled_state.ARRIVING), np.int32)
    requests[: trace.count] = trace.requests[: trace.count]
    keys = np.zeros(sizes.keys, np.int32)
    keys[: len(trace.keys)] = trace.keys
    return Trace(requests, keys, numbers, diagnosed(config, parameters))  # type: ignore[arg-type]


def diagnosed(config: VllmConfig, parameters: Parameters) -> np.ndarray:
    """`Parameters.groups` with a draft's proof, in tokens, for `EAGLE`, and for `REACH` what queries read."""
    groups = np.array(parameters.groups)
    for group, spec in enumerate(config.topology.specs):
        proves = group in config.eagle_group_ids and not spec.snapshot
        groups[group, GroupField.EAGLE] = config.block_size(group) if proves else 0
        if isinstance(spec, SlidingWindow):
            groups[group, GroupField.REACH] = spec.window - 1
    return groups


def free_queue(state: State) -> list[int]:
    """Block ids in the free queue of a state on the host, the next to be handed out first."""
    head, tail = int(state.counters[Counter.HEAD]), int(state.counters[Counter.TAIL])
    ring = len(state.queue) - 1
    places = np.arange(head, tail, dtype=np.int64) % ring
    blocks = np.asarray(state.queue)[places]
    return blocks[blocks != 0].tolist()


def _rounded(size: int, least: int) -> int:
    while least < size:
        least *= 2
    return least

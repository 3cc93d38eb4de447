"""Replays a trace under RTP-LLM's rules on the device: sizes, inputs, and what is left."""

from __future__ import annotations

import collections
import dataclasses

import jax
import numpy as np

from hkv.dialects.rtp_llm import machine as rtp_cache
from hkv.dialects.rtp_llm.config import RtpConfig
from hkv.dialects.rtp_llm.engines.jax_reading import Reader
from hkv.dialects.rtp_llm.log import RtpState
from hkv.dialects.rtp_llm.schedule import compiled_history as rtp_compiled_state
from hkv.dialects.rtp_llm.schedule import program as rtp_program
from hkv.dialects.rtp_llm.schedule.agreement import REASONS, RtpRecorder
from hkv.dialects.rtp_llm.schedule.compiled_history import VERDICTS, RtpResident, Tally
from hkv.errors import ConfigError
from hkv.replay.dispatches import STEPS, Dispatches, Incoming, rounded, trace_arrays
from hkv.replay.schedule import Schedule
from hkv.replay.schedule_state import Trace
from hkv.state.pooled import Counter, PooledBuckets

NAMES = ("granted", "permanent", "retryable", "internal_error")
"""Names of `VERDICTS` in logs."""

REPORTED = {int(status): name for status, name in zip(VERDICTS, NAMES, strict=True)}
"""The same by what a replay reports."""


@dataclasses.dataclass(frozen=True)
class RtpSizes:
    """Static sizes: the cache's buckets, and further ones."""

    buckets: PooledBuckets
    requests: int
    keys: int

    @classmethod
    def of(cls, config: RtpConfig, schedule: Schedule, trace: Incoming) -> RtpSizes:
        """Sizes that a replay fits, rounded up so that few executables serve many."""
        longest = trace.longest(schedule.max_model_len)
        groups = rounded(len(config.policies), 1)
        row = rounded(-(-longest // config.block_size) + schedule.lookahead + 3, 64)
        buckets = PooledBuckets(
            blocks=rounded(max(config.num_blocks), 1024),
            groups=groups,
            pools=groups,
            requests=rounded(trace.slots(schedule.max_running), 4),
            sequences=1,
            row=row,
            chain=row,
            keys=rounded(max(1, trace.num_keys), 1024),
            names=rtp_cache.names_of(config),
        )
        return cls(buckets, rounded(trace.count, 64), rounded(len(trace.keys), 4096))

    def ids_of_a_step(self) -> int:
        """Most integers that one step reports: lists of all running requests twice, and of the queue's head."""
        lists = self.buckets.groups * (1 + self.buckets.row)
        return 2 * (self.buckets.requests + 1) * (2 + lists) + self.requests * (2 + self.buckets.groups)


def require_expressible(config: RtpConfig) -> None:
    """Raises for configurations whose rules the compiled schedule does not have."""
    if config.cp_size > 1:
        raise ConfigError("cp_size", config.cp_size, "1: the compiled schedule is one rank's")


class RtpCompiledReplay(Dispatches):
    """A trace, a cache and a schedule, replayed in as few dispatches as steps allow."""

    def __init__(
        self,
        config: RtpConfig,
        schedule: Schedule,
        trace: Incoming,
        *,
        caching: bool = True,
        sizes: RtpSizes | None = None,
        diagnose: bool = True,
        ids: int = 0,
        steps: int = STEPS,
    ) -> None:
        require_expressible(config)
        self.config = config
        self._num_keys, self._diagnose = trace.num_keys, diagnose
        sizes = sizes or RtpSizes.of(config, schedule, trace)
        parameters, state = rtp_cache.init(config, sizes.buckets)
        reserve = schedule.lookahead + 1 if schedule.lookahead else 0
        more = {"lookahead": reserve, "caching": int(caching), "diagnose": int(diagnose)}
        arrays = trace_arrays(schedule, trace, sizes.requests, sizes.keys, **more)
        self._parameters = jax.device_put(parameters)
        inputs = jax.device_put(Trace(*arrays))  # type: ignore[arg-type]
        resident = jax.device_put(rtp_compiled_state.begin(state, sizes.requests, steps))
        super().__init__(trace, len(config.policies), ids, resident, inputs)

    def _step(self, resident: RtpResident) -> tuple[RtpResident, jax.Array, jax.Array]:
        return rtp_program.compiled(self._room)(self._parameters, self._inputs, resident)

    @property
    def tally(self) -> Tally:
        """Counts of the replay so far, as NumPy integers."""
        return Tally(*np.asarray(self._resident.tally))

    @property
    def evictions(self) -> int:
        """Blocks that were evicted."""
        return int(np.asarray(self._resident.cache.counters)[Counter.EVICTIONS])

    @property
    def duplicates(self) -> int:
        """Blocks that were not cached because another one was there."""
        return int(self.tally.duplicates)

    def state(self) -> RtpState:
        """Everything of the cache that can be compared; keys are the trace's numbers, requests are not listed."""
        return Reader(self.config).state(jax.device_get(self._resident.cache), {}, range(self._num_keys))

    def recorder(self) -> RtpRecorder:
        """Everything that happened, as the plain schedule's observer would have recorded it."""
        recorder, tally = RtpRecorder(self.config, None, None, lambda: None), self.tally
        self._record(recorder, REASONS if self._diagnose else ())
        recorder.cached_peak = int(tally.cached_peak)
        for place, kind in ((0, "admission"), (len(VERDICTS), "growth")):
            counts = zip(NAMES, tally[place : place + len(VERDICTS)], strict=True)
            recorder.verdicts[kind] = collections.Counter({name: int(count) for name, count in counts if count})
        return recorder

"""Puts a replay together: trace, cache, engine, schedule, record."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import cast

import numpy as np

from hkv.dialects.rtp_llm.config import RtpConfig
from hkv.dialects.vllm.config import VllmConfig, default_block_sizes, default_partial_hits
from hkv.dialects.vllm.engines.engine import Engine, KeyedEngine
from hkv.dialects.vllm.log.configuration import to_header
from hkv.dialects.vllm.log.structs import Header
from hkv.dialects.vllm.schedule.agreement import ComparedEngine, compare, compare_queues, compare_records
from hkv.dialects.vllm.schedule.chunking import Chunking
from hkv.dialects.vllm.schedule.diagnosis import REASONS, Diagnosis, MissDiagnosis
from hkv.dialects.vllm.schedule.lockstep import LockstepEngine
from hkv.dialects.vllm.schedule.schedule import Arrival, Replay, Schedule
from hkv.errors import ConfigError
from hkv.model.topology import Topology
from hkv.oracle.engines import engine_factory
from hkv.replay.record import Recorder
from hkv.replay.traces.prefix_keys import PrefixKeys
from hkv.replay.traces.reader import TOKENS_PER_ID, TraceRequest, read_trace
from hkv.spec import LayerSpec

REFERENCE = "numpy"
"""The engine that `check` holds the chosen one against."""

COMPILED = "jax"
"""The engine whose replays are compiled whole, schedule included."""

DEFAULT_ENGINE = COMPILED
"""The command's engine, for caches that it can represent."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """How a trace's milliseconds become steps.

    Attributes:
      step_ms: milliseconds of a step.
      speed: how many times faster than recorded requests arrive.
    """

    step_ms: int = 50
    speed: Fraction = Fraction(1)

    def __post_init__(self) -> None:
        if type(self.step_ms) is not int or self.step_ms < 1:
            raise ConfigError("step_ms", self.step_ms, "an integer of at least 1")
        if self.speed <= 0:
            raise ConfigError("speed", str(self.speed), "a positive number")

    def step_of(self, timestamp: float) -> int:
        """The first step that begins at or after a time stamp in milliseconds, exactly."""
        return math.ceil(Fraction(timestamp) / (self.step_ms * self.speed))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A finished replay.

    Attributes:
      config: the cache.
      recorder: everything that happened.
      steps: number of the last step + 1, skipped ones included.
      evictions: cached blocks handed out to another use, or None when the engine does not count them.
      seconds: wall time of the replay.
      reasons: names of the reasons why hits end, in the order in which tables list them.
      longest: most tokens of a request, where the configuration does not say.
      verdicts: under RTP-LLM's rules, answers to allocations, those of admissions and of growth apart.
      cached_peak: under RTP-LLM's rules, most blocks that the cache held, or None when the engine does not count them.
      duplicates: under RTP-LLM's rules, blocks not cached as their key had one, or None when nobody counts them.
    """

    config: VllmConfig | RtpConfig
    recorder: Recorder
    steps: int
    evictions: int | None
    seconds: float
    reasons: tuple[str, ...] = REASONS
    longest: int = 0
    verdicts: dict[str, dict[str, int]] | None = None
    cached_peak: int | None = None
    duplicates: int | None = None

    @property
    def blocks(self) -> int:
        """Blocks that can be handed out, over all pools."""
        counts = (self.config.num_blocks,) if isinstance(self.config, VllmConfig) else self.config.num_blocks
        return sum(counts) - len(counts)

    @property
    def max_model_len(self) -> int:
        """Most tokens that a request may have."""
        return self.config.max_model_len if isinstance(self.config, VllmConfig) else self.longest

    @property
    def eagle_groups(self) -> frozenset[int]:
        """Indices of the groups under the EAGLE drop rule."""
        return frozenset(self.config.eagle_group_ids) if isinstance(self.config, VllmConfig) else frozenset()


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

    Args:
      specs: one per group.
      num_blocks: blocks in the pool, the null block included.
      schedule: gives the longest request and the tokens of a step.
      caching: whether prefix caching is on.
      eagle: groups that serve a draft module, none for all groups; None without one.
      retention_interval: tokens between two retained replay boundaries, 0 for none, None for dense.

    Raises:
      HKVError: the dialect forbids it.
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


def arrivals(requests: Iterator[TraceRequest], keys: PrefixKeys, timing: Timing) -> Iterator[Arrival]:
    """The requests of a trace on their way in, read as the replay comes to need them."""
    for index, request in enumerate(requests):
        step = timing.step_of(request.timestamp)
        yield Arrival(index, step, request.input_length, request.output_length, _Keys(keys, request))


@dataclasses.dataclass(frozen=True, slots=True)
class _Keys:
    """Makes one request's keys when called."""

    keys: PrefixKeys
    request: TraceRequest

    def __call__(self) -> list[int]:
        return self.keys.of(self.request).tolist()


def keyed_engine(name: str, config: VllmConfig) -> KeyedEngine:
    """An empty engine that takes requests by their keys.

    Raises:
      HKVError: no such engine, a missing package, or an engine that cannot represent the configuration.
    """
    engine: Engine = engine_factory(name)(header(config))
    if not isinstance(engine, KeyedEngine):
        raise ConfigError("engine", name, "an engine that takes requests by their prefix keys")
    return engine


def default_engine(config: VllmConfig) -> tuple[str, str]:
    """The compiled engine; where it cannot represent the cache, the NumPy engine and the reason."""
    from hkv.dialects.vllm.schedule import compiled

    try:
        compiled.require_expressible(config)
    except ConfigError as error:
        return REFERENCE, str(error)
    return DEFAULT_ENGINE, ""


def header(config: VllmConfig) -> Header:
    """The log header of a replay's cache."""
    return to_header(config, "eagle" if config.eagle else "core")


def replay(
    trace: str,
    config: VllmConfig,
    schedule: Schedule,
    timing: Timing,
    *,
    engine: str = REFERENCE,
    check: bool = False,
    tokens_per_id: int = TOKENS_PER_ID,
    limit: int | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Outcome:
    """Replays a trace.

    Args:
      trace: path of the trace.
      config: the cache.
      schedule: the numbers that steer the replay.
      timing: how time stamps become steps.
      engine: name of the engine.
      check: whether the NumPy engine runs beside it; where the replay is compiled whole, after it, and all is compared.
      tokens_per_id: tokens that one of the trace's `hash_ids` stands for.
      limit: most requests to replay, or None for all.
      progress: called each time a request has finished or is refused for good.

    Raises:
      HKVError: the trace, the configuration or the engine cannot be used.
      Difference: the engines disagree.
    """
    if check and engine == REFERENCE:
        raise ConfigError("check", engine, f"an engine other than {REFERENCE}, which it is held against")
    keys = PrefixKeys(config.hash_block_size, tokens_per_id)
    coming = arrivals(read_trace(trace, tokens_per_id, limit), keys, timing)
    if engine == COMPILED:
        return _compiled(config, schedule, list(coming), check, progress)
    driven = keyed_engine(engine, config)
    oracle: object = driven
    if check:
        reference = keyed_engine(REFERENCE, config)
        driven, oracle = LockstepEngine(driven, reference, (engine, REFERENCE)), reference
    return _plain(config, schedule, coming, driven, oracle, progress)


def _plain(
    config: VllmConfig,
    schedule: Schedule,
    coming: Iterable[Arrival],
    driven: KeyedEngine,
    oracle: object,
    progress: Callable[[], None],
) -> Outcome:
    """The schedule in Python, over any engine; `oracle` is asked why hits ended, if it can tell."""
    diagnosis = Diagnosis(config, oracle) if isinstance(oracle, MissDiagnosis) else None
    recorder = Recorder(config.num_blocks, len(config.topology.groups), diagnosis, progress)
    started = time.perf_counter()
    steps = Replay(driven, schedule, Chunking.of(config, schedule.step_tokens), coming, recorder).run()
    seconds = time.perf_counter() - started
    return Outcome(config, recorder, steps, getattr(driven, "evictions", None), seconds)


def _compiled(
    config: VllmConfig, schedule: Schedule, coming: Sequence[Arrival], check: bool, progress: Callable[[], None]
) -> Outcome:
    """The compiled schedule over the compiled cache; checked, afterwards, by the plain one over the NumPy engine."""
    from hkv.dialects.vllm.schedule import compiled
    from hkv.replay import dispatches

    prepared = dispatches.incoming(coming, schedule.max_model_len)
    sizes = compiled.Sizes.of(config, schedule, prepared)
    room = sizes.ids_of_a_step(config, schedule) * 2 if check else 0
    running = compiled.CompiledReplay(config, schedule, prepared, sizes=sizes, ids=room)
    started = time.perf_counter()
    steps = running.run((lambda: None) if check else progress)
    seconds = time.perf_counter() - started
    outcome = Outcome(config, running.recorder(), steps, running.evictions, seconds)
    if check:
        names = (COMPILED, REFERENCE)
        reference = keyed_engine(REFERENCE, config)
        compared = ComparedEngine(reference, np.concatenate(running.ids), names)
        again = [dataclasses.replace(arrival, keys=prepared.keys_of(arrival.index)) for arrival in coming]
        other = _plain(config, schedule, again, cast(KeyedEngine, compared), reference, progress)
        compared.check_all_compared()
        compare_outcomes(outcome, other, names)
        compare_queues(running.free_queue(), reference.state().free, names)
    return outcome


def compare_outcomes(mine: Outcome, other: Outcome, names: tuple[str, str]) -> None:
    """Compares two replays of one trace.

    Raises:
      Difference: names the first one.
    """
    compare_records(mine.recorder, other.recorder, names)
    compare("number of steps", mine.steps, other.steps, names)
    compare("evictions", mine.evictions, other.evictions, names)

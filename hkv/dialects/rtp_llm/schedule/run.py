"""Puts a replay under RTP-LLM's rules together: trace, cache, engine, schedule, record."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from hkv.dialects.rtp_llm.config import HYBRID_POOL, RtpConfig, reserve_for_ratio
from hkv.dialects.rtp_llm.engines.engine import KeyedRtpEngine
from hkv.dialects.rtp_llm.log.configuration import to_rtp_header
from hkv.dialects.rtp_llm.log.structs import RtpState, StateOp
from hkv.dialects.rtp_llm.schedule.agreement import ComparedRtpEngine, RtpLockstep, compare_rtp_records, compare_states
from hkv.dialects.rtp_llm.schedule.record import REASONS, RtpDiagnosis, RtpMissDiagnosis, RtpRecorder
from hkv.dialects.rtp_llm.schedule.schedule import RtpReplay
from hkv.dialects.vllm.schedule.agreement import compare
from hkv.dialects.vllm.schedule.run import COMPILED, REFERENCE, Outcome, Timing, arrivals
from hkv.dialects.vllm.schedule.schedule import Arrival, Schedule
from hkv.errors import ConfigError, HKVError
from hkv.model.group_policy import EvictPolicy, GroupPolicy, GroupType, default_policy
from hkv.model.topology import Group, Topology
from hkv.oracle.engines import engine_factory
from hkv.replay.traces.prefix_keys import PrefixKeys
from hkv.replay.traces.reader import TOKENS_PER_ID, read_trace
from hkv.spec import AttentionSpec, LayerSpec, Mamba, SlidingWindow

if TYPE_CHECKING:
    from hkv.dialects.rtp_llm.schedule.compiled import RtpCompiledReplay

RESERVE_RATIO = 5
"""Percent of its blocks that RTP-LLM leaves free at a first allocation unless told otherwise."""


def rtp_cache(
    dialect: str,
    specs: Sequence[LayerSpec],
    num_blocks: Sequence[int],
    *,
    linear_step: int = 1,
    reserve_ratio: int = RESERVE_RATIO,
    prefix_tree: bool = False,
    independent_eviction: bool = False,
    caching: bool = True,
) -> RtpConfig:
    """The cache that a replay studies under RTP-LLM's rules.

    Attention is a FULL group, a recurrent state a LINEAR one, a window a SWA one with reuse and two blocks at the end,
    as RTP-LLM's descriptions of state caches have it; more where nothing is cached and the window reads more. One
    number of blocks serves every pool; the pool of a window then has one for every `linear_step` of them
    (`CacheConfig::finalizeBlockNums`).

    Args:
      dialect: one of `hkv.dialects.rtp_llm.config.NAMES`; it must be the one that the groups amount to.
      specs: one per group.
      num_blocks: blocks of each pool, block 0 included, or one number.
      linear_step: blocks between two states kept for reuse.
      reserve_ratio: percent of the blocks that a first allocation leaves free.
      prefix_tree: eviction by chains of the prefix tree.
      independent_eviction: windows may lose blocks alone.
      caching: whether requests reuse and are reused.

    Raises:
      HKVError: RTP-LLM has no such group, or forbids the cache.
    """
    groups = tuple(
        Group(tag=f"{spec.short_name}{index}", spec=spec, policy=_policy(index, spec, caching))
        for index, spec in enumerate(specs)
    )
    pools = "independent" if dialect == HYBRID_POOL else "shared"
    counts = tuple(num_blocks)
    if pools == "independent" and len(counts) == 1:
        step = max(1, linear_step)
        swa = [group.policy.group_type is GroupType.SWA for group in groups]
        counts = tuple(-(-counts[0] // step) if window else counts[0] for window in swa)
    config = RtpConfig(
        topology=Topology(groups, pools=pools),
        num_blocks=counts,
        linear_step=linear_step,
        reserve_blocks=reserve_for_ratio(reserve_ratio, sum(counts) - len(counts)),
        prefix_tree=prefix_tree,
        independent_eviction=independent_eviction,
    )
    check_replayable(config, dialect, caching)
    return config


def check_replayable(config: RtpConfig, dialect: str, caching: bool) -> None:
    """Make sure that a configuration is the dialect's and that queries after a hit find all that they read.

    Args:
      config: the cache.
      dialect: whose it is said to be.
      caching: whether there are hits.

    Raises:
      ConfigError: another dialect's, or hits, and a window that reads more than a block before its own token. RTP-LLM
        looks a SWA group up under the last key alone (`SWAKVCacheGroup::matchSingleKey`), whatever the window.
    """
    if config.name != dialect:
        groups = len(config.topology.groups)
        raise ConfigError("dialect", dialect, f"{config.name}, for {groups} group{'s' * (groups > 1)} over these pools")
    for group in config.topology.groups:
        if caching and isinstance(group.spec, SlidingWindow) and group.spec.window > group.spec.block_size + 1:
            expected = (
                f"at most {group.spec.block_size + 1}: RTP-LLM's hits bring one block of a window, that of the last "
            )
            expected += f"key; larger blocks, of {group.spec.window - 1} tokens, or --no-caching"
            raise ConfigError(f"window of group {group.tag}", group.spec.window, expected)


def tail_blocks(window: SlidingWindow) -> int:
    """Blocks at the end of a list that the next query reads at most; 2, RTP-LLM's default, where it reads fewer."""
    return max(2, 1 + -(-(window.window - 2) // window.block_size))


def _policy(index: int, spec: LayerSpec, caching: bool) -> GroupPolicy:
    if isinstance(spec, Mamba):
        return default_policy(GroupType.LINEAR)
    if isinstance(spec, SlidingWindow):
        tail = 2 if caching else tail_blocks(spec)
        return GroupPolicy(group_type=GroupType.SWA, evict_policy=EvictPolicy.INDEPENDENT, active_tail_blocks=tail)
    if isinstance(spec, AttentionSpec) and spec.readable(1 << 40).start == 0:
        return default_policy(GroupType.FULL)
    raise ConfigError(f"groups[{index}]", spec.kind, "full, mla, swa or mamba under RTP-LLM")


def keyed_rtp_engine(name: str, config: RtpConfig) -> KeyedRtpEngine:
    """An empty engine under RTP-LLM's rules that takes requests by their keys.

    Raises:
      HKVError: no such engine, a missing package, or an engine that cannot represent the configuration.
    """
    engine = engine_factory(name)(to_rtp_header(config, "replay"))
    if not isinstance(engine, KeyedRtpEngine):
        raise ConfigError("engine", name, f"an engine that takes requests by their prefix keys under {config.name}")
    return engine


def rtp_replay(
    trace: str,
    config: RtpConfig,
    schedule: Schedule,
    timing: Timing,
    *,
    engine: str = REFERENCE,
    caching: bool = True,
    check: bool = False,
    tokens_per_id: int = TOKENS_PER_ID,
    limit: int | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Outcome:
    """Replays a trace.

    Args:
      trace: path of the trace.
      config: the cache.
      schedule: the numbers that steer the replay; `lookahead` drafts are a reserve of one token more.
      timing: how time stamps become steps.
      engine: name of the engine.
      caching: whether requests reuse and are reused.
      check: whether the NumPy engine runs beside it; where the replay is compiled whole, after it, and all is compared.
      tokens_per_id: tokens that one of the trace's `hash_ids` stands for.
      limit: most requests to replay, or None for all.
      progress: called each time a request has finished or is refused for good.

    Raises:
      HKVError: the trace, the configuration or the engine cannot be used, or the engine performs a legal operation not.
      Difference: the engines disagree.
    """
    if check and engine == REFERENCE:
        raise ConfigError("check", engine, f"an engine other than {REFERENCE}, which it is held against")
    keys = PrefixKeys(config.block_size, tokens_per_id)
    coming = arrivals(read_trace(trace, tokens_per_id, limit), keys, timing)
    if engine == COMPILED:
        return _compiled(config, schedule, list(coming), caching, check, progress)
    driven = keyed_rtp_engine(engine, config)
    oracle: object = driven
    if check:
        reference = keyed_rtp_engine(REFERENCE, config)
        driven, oracle = RtpLockstep(driven, reference, (engine, REFERENCE)), reference
    return _plain(config, schedule, coming, driven, oracle, caching, progress)


def default_rtp_engine(config: RtpConfig) -> tuple[str, str]:
    """The compiled engine; where it cannot represent the cache, the NumPy engine and the reason."""
    from hkv.dialects.rtp_llm.schedule import compiled as rtp_compiled

    try:
        rtp_compiled.require_expressible(config)
    except HKVError as error:
        return REFERENCE, str(error)
    return COMPILED, ""


def _plain(
    config: RtpConfig,
    schedule: Schedule,
    coming: Iterable[Arrival],
    driven: KeyedRtpEngine,
    oracle: object,
    caching: bool,
    progress: Callable[[], None],
) -> Outcome:
    """The schedule in Python, over any engine; `oracle` is asked why hits ended, if it can tell."""
    diagnosis = RtpDiagnosis(config, oracle, caching=caching) if isinstance(oracle, RtpMissDiagnosis) else None
    recorder = RtpRecorder(config, diagnosis, getattr(oracle, "num_cached", None), progress)
    started = time.perf_counter()
    steps = RtpReplay(driven, config.block_size, caching, schedule, coming, recorder).run()
    seconds = time.perf_counter() - started
    counts = getattr(oracle, "evictions", None), getattr(oracle, "duplicates", None)
    return _outcome(config, schedule, recorder, steps, seconds, counts)


def _compiled(
    config: RtpConfig,
    schedule: Schedule,
    coming: Sequence[Arrival],
    caching: bool,
    check: bool,
    progress: Callable[[], None],
) -> Outcome:
    """The compiled schedule over the compiled cache; checked, afterwards, by the plain one over the NumPy engine."""
    from hkv.dialects.rtp_llm.schedule import compiled as rtp_compiled
    from hkv.replay import dispatches

    prepared = dispatches.incoming(coming, schedule.max_model_len)
    sizes = rtp_compiled.RtpSizes.of(config, schedule, prepared)
    room = 2 * sizes.ids_of_a_step() if check else 0
    running = rtp_compiled.RtpCompiledReplay(config, schedule, prepared, caching=caching, sizes=sizes, ids=room)
    started = time.perf_counter()
    steps = running.run((lambda: None) if check else progress)
    seconds = time.perf_counter() - started
    outcome = outcome_of(running, schedule, steps, seconds)
    if check:
        again = [dataclasses.replace(arrival, keys=prepared.keys_of(arrival.index)) for arrival in coming]
        verify(running, outcome, schedule, again, caching=caching, progress=progress)
    return outcome


def outcome_of(running: RtpCompiledReplay, schedule: Schedule, steps: int, seconds: float) -> Outcome:
    """What a compiled replay left that took so many steps and seconds."""
    counts = running.evictions, running.duplicates
    return _outcome(running.config, schedule, running.recorder(), steps, seconds, counts)


def verify(
    running: RtpCompiledReplay,
    outcome: Outcome,
    schedule: Schedule,
    coming: Sequence[Arrival],
    *,
    caching: bool,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Holds a compiled replay that has run, with room for ids, against the plain schedule over the NumPy engine.

    Args:
      running: the replay.
      outcome: what it left.
      schedule: the numbers.
      coming: the same requests.
      caching: as it was.
      progress: called each time a request has finished or is refused for good.

    Raises:
      Difference: names the first one.
    """
    from hkv.dialects.rtp_llm.schedule.compiled import REPORTED

    names, config = (COMPILED, REFERENCE), running.config
    reference = keyed_rtp_engine(REFERENCE, config)
    compared = ComparedRtpEngine(reference, np.concatenate(running.ids), REPORTED, names)
    other = _plain(config, schedule, coming, cast(KeyedRtpEngine, compared), reference, caching, progress)
    compared.check_all_compared()
    compare_rtp_records(cast(RtpRecorder, outcome.recorder), cast(RtpRecorder, other.recorder), names)
    for field in ("steps", "evictions", "duplicates"):
        compare(field, getattr(outcome, field), getattr(other, field), names)
    compare_states(running.state(), cast(RtpState, reference.perform(StateOp())), names)


def _outcome(
    config: RtpConfig,
    schedule: Schedule,
    recorder: RtpRecorder,
    steps: int,
    seconds: float,
    counts: tuple[int | None, int | None],
) -> Outcome:
    evictions, duplicates = counts
    return Outcome(
        config,
        recorder,
        steps,
        evictions,
        seconds,
        longest=schedule.max_model_len,
        reasons=REASONS,
        verdicts={name: dict(counter) for name, counter in recorder.verdicts.items()},
        cached_peak=recorder.cached_peak,
        duplicates=duplicates,
    )

"""Puts a replay under RTP-LLM's rules together: trace, cache, engine, schedule, record."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from hkv.contract.answer import EngineFactory
from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm import monitoring
from hkv.dialects.rtp_llm.config import HYBRID_POOL, RESERVE_RATIO, RtpConfig, reserve_for_ratio
from hkv.dialects.rtp_llm.engines.engine import KeyedRtpEngine
from hkv.dialects.rtp_llm.log import RtpState, StateOp, to_rtp_header
from hkv.dialects.rtp_llm.planning.blocks import tail_blocks
from hkv.dialects.rtp_llm.schedule.agreement import (
    REASONS,
    RtpDiagnosis,
    RtpLockstep,
    RtpMissDiagnosis,
    RtpRecorder,
    compare_states,
)
from hkv.errors import ConfigError, EngineProcessError
from hkv.limits import MAX_BLOCKS
from hkv.model.group_policy import EvictPolicy, GroupPolicy, GroupType, default_policy
from hkv.model.topology import Group, Topology
from hkv.replay.observed import HitUnits
from hkv.replay.optimal import BoundedPool
from hkv.replay.run import EVICTS_NOTHING, Progress, ReplayedCache
from hkv.replay.schedule import Arrival, LiveRequest, Refusal, Schedule, StepLoop
from hkv.spec import LayerSpec, attention_of, spec_to_text


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
    """
    groups = tuple(
        Group(tag=f"{spec.written.short_name}{index}", spec=spec, policy=_policy(index, spec, caching))
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

    RTP-LLM looks a SWA group up under the last key alone (`SWAKVCacheGroup::matchSingleKey`), whatever it reads: with
    hits, no window or chunk may read more than a block before its own token.
    """
    if config.name != dialect:
        groups = len(config.topology.groups)
        raise ConfigError("dialect", dialect, f"{config.name}, for {groups} group{'s' * (groups > 1)} over these pools")
    for group in config.topology.groups:
        if caching and group.spec.most_read > group.spec.block_size + 1:
            expected = (
                f"at most {group.spec.block_size + 1}: RTP-LLM's hits bring one block of a window, that of the last "
            )
            expected += f"key; larger blocks, of {group.spec.most_read - group.spec.slides} tokens, or --no-caching"
            raise ConfigError(f"window of group {group.tag}", group.spec.most_read, expected)


def _policy(index: int, spec: LayerSpec, caching: bool) -> GroupPolicy:
    if spec.snapshot:
        return default_policy(GroupType.LINEAR)
    if spec.slides:
        tail = 2 if caching else tail_blocks(spec)
        return GroupPolicy(group_type=GroupType.SWA, evict_policy=EvictPolicy.INDEPENDENT, active_tail_blocks=tail)
    if attention_of(spec) and spec.readable(1 << 40).start == 0:
        return default_policy(GroupType.FULL)
    raise ConfigError(f"groups[{index}]", spec.kind, "full, mla, swa or mamba under RTP-LLM")


class RtpReplayedCache(ReplayedCache):
    """A cache under RTP-LLM's rules, for a replay to study."""

    config: RtpConfig
    reasons = REASONS

    def __init__(self, config: RtpConfig, *, caching: bool = True) -> None:
        specs, counts, reserve = config.topology.specs, config.num_blocks, config.reserve_blocks
        grouped = [specs] if len(counts) == 1 else [(spec,) for spec in specs]
        pools = [BoundedPool(count - 1, each, reserve) for count, each in zip(counts, grouped, strict=True)]
        units = HitUnits(config.block_size, config.block_size)
        super().__init__(config, config.topology.groups, pools, units, reuses=caching)
        self.caching = caching
        # Layers of a plan have RTP-LLM's kinds and are called by their tags.
        named = ((group.tag if group.layers else "", group.spec) for group in self.groups)
        self.group_names = [f"{tag}:{spec.block_size}" if tag else spec_to_text(spec) for tag, spec in named]

    def changed(self, tokens: int, requests: int, schedule: Schedule) -> Mapping[str, ReplayedCache]:
        config = self.config
        if not self.caching:
            return {}
        most = 2 + len(config.policies) * (tokens // config.block_size + 2 * requests)
        pools = tuple(min(max(most, count), MAX_BLOCKS) for count in config.num_blocks)
        # The reserve, which keeps requests that run from waiting, is nothing to a pool that never lacks a block.
        endless = RtpReplayedCache(dataclasses.replace(config, num_blocks=pools, reserve_blocks=0))
        found = {EVICTS_NOTHING: endless.made_by(num_blocks=",".join(map(str, pools)), reserve_ratio=0)}
        if config.linear_step > 1:
            same, kept = ",".join(map(str, config.num_blocks)), dataclasses.replace(config, linear_step=1)
            found["States kept at every block"] = RtpReplayedCache(kept).made_by(linear_step=1, num_blocks=same)
        return found

    def engine(self, name: str, make: EngineFactory) -> KeyedRtpEngine:
        engine = make(to_rtp_header(self.config, "replay"))
        if not isinstance(engine, KeyedRtpEngine):
            expected = f"an engine that takes requests by their prefix keys under {self.config.name}"
            raise ConfigError("engine", name, expected)
        return engine

    def lockstep(self, engine: KeyedRtpEngine, reference: KeyedRtpEngine, names: tuple[str, str]) -> Any:
        return RtpLockstep(engine, reference, names)

    def loop(
        self, schedule: Schedule, coming: Iterable[Arrival], driven: KeyedRtpEngine, oracle: Any, progress: Progress
    ) -> RtpReplay:
        config, caching = self.config, self.caching
        diagnosis = RtpDiagnosis(config, oracle, caching=caching) if isinstance(oracle, RtpMissDiagnosis) else None
        recorder = RtpRecorder(config, diagnosis, oracle, progress)
        return RtpReplay(driven, config.block_size, caching, schedule, coming, recorder)

    def require_compiled(self) -> None:
        if self.config.cp_size > 1:
            raise ConfigError("cp_size", self.config.cp_size, "1: the compiled schedule is one rank's")

    def begun(self, schedule: Schedule, prepared: Any, check: bool) -> Any:
        from hkv.dialects.rtp_llm.schedule.compiled import RtpCompiledReplay

        more = {"caching": self.caching, "diagnose": self.diagnoses or check, "room": self.room}
        return RtpCompiledReplay(self.config, schedule, prepared, **more)

    def compare_ends(self, running: Any, reference: Any, names: tuple[str, str]) -> None:
        compare_states(running.state(), cast(RtpState, reference.perform(StateOp())), names)

    def monitored(self, state: RtpState, requests: Iterable[tuple[float, Sequence[int]]]) -> Mapping[str, Any]:
        return monitoring.monitored(self.config, state, requests)

    def rows(self, totals: Mapping[str, Any]) -> Sequence[tuple[str, Any, str]]:
        verdicts = totals["verdicts"]
        told = {
            name: ", ".join(f"{count:,} {verdict}" for verdict, count in sorted(counts.items())) or "none"
            for name, counts in verdicts.items()
        }
        return (
            ("blocks cached, peak", totals["blocks_cached_peak"], "held by the cache, in use or not"),
            ("not cached twice", totals["blocks_not_cached_twice"], "blocks whose key had another"),
            ("allocations, admission", sum(verdicts["admission"].values()), told["admission"]),
            ("allocations, growth", sum(verdicts["growth"].values()), told["growth"]),
        )


# The schedule of a replay under RTP-LLM's rules (`docs/replay.md`): a whole prompt gets its blocks at once.


GRANTED, PERMANENT = "granted", "permanent"


class _Held(NamedTuple):
    """Length for which a running request's last allocation was made.

    Attributes:
      slots: as `_slots` gives them; none after the first allocation, which prunes nothing.
    """

    tokens: int
    slots: tuple[int, ...]


class RtpReplay(StepLoop):
    """Drives an engine under RTP-LLM's rules through a trace."""

    def __init__(
        self,
        engine: KeyedRtpEngine,
        block_size: int,
        caching: bool,
        schedule: Schedule,
        arrivals: Iterable[Arrival],
        observer: RtpRecorder,
    ) -> None:
        super().__init__(engine, schedule, arrivals, observer)
        self._size = block_size
        self._caching = caching
        self._told = observer
        self._reserve = schedule.lookahead + 1 if schedule.lookahead else 0
        self._held: dict[str, _Held] = {}

    def left(self) -> dict[str, Any]:
        return {**self._told.left(), "state": lambda: self._engine.perform(StateOp())}

    def _request(self, live: LiveRequest) -> None:
        self._engine.request_keyed(live.id, live.arrival.prompt, live.keys, self._reserve)

    def _available(self) -> int:
        return self._engine.num_available()

    def _grow(self, live: LiveRequest, new: int) -> bool:
        """RTP-LLM asks at every step; what cannot change anything is not asked."""
        held = self._held[live.id]
        if held.tokens == live.tokens:
            return True
        slots = self._slots(live.tokens)
        if held.slots != slots and self._malloc(live).verdict != GRANTED:
            return False
        self._held[live.id] = _Held(live.tokens, slots)
        return True

    def _slots(self, tokens: int) -> tuple[int, ...]:
        """Lengths on which an allocation depends: slots, slots with the reserve, and whole blocks, which have keys."""
        return -(-tokens // self._size), -(-(tokens + self._reserve) // self._size), tokens // self._size

    def _admit(self, live: LiveRequest, budget: int) -> tuple[int, int] | Refusal:
        self._told.asked(live)
        answer = self._malloc(live)
        if answer.verdict != GRANTED:
            return Refusal.NEVER if answer.verdict == PERMANENT else Refusal.PUT_OFF
        self._held[live.id] = _Held(live.tokens, ())
        return answer.reused, min(live.tokens - answer.reused, budget)

    def _malloc(self, live: LiveRequest) -> structs.Malloc:
        answer = self._engine.perform(structs.MallocOp(id=live.id, reuse=self._caching, device_cache=self._caching))
        if not isinstance(answer, structs.Malloc):
            raise EngineProcessError("engine answered malloc", answer, "a verdict, the tokens reused and all lists")
        self._told.answered(live, answer.verdict)
        return answer

    def _free(self, live: LiveRequest, *, finished: bool) -> None:
        """Frees a request's blocks; if it finished, they enter the cache first. A preempted request's work is lost."""
        if finished and self._caching:
            self._engine.perform(structs.InsertOp(id=live.id))
        self._engine.perform(structs.FreeOp(id=live.id))
        del self._held[live.id]

    def _drop(self, live: LiveRequest) -> None:
        self._engine.perform(structs.DropOp(id=live.id))

    def _extend(self, live: LiveRequest, tokens: int) -> None:
        self._engine.extend(live.id, tokens)

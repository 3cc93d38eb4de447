"""vLLM 0.33 as a dialect: where everything that HKV asks of it stands."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from hkv.contract.dialect import Dialect, Process
from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.bugs import BUGS
from hkv.dialects.vllm.config import EARLIER, NAME
from hkv.errors import EngineFailure, OperationError, UnsupportedConfigError
from hkv.model.topology import Topology
from hkv.spec import spec_from_log

if TYPE_CHECKING:
    from hkv.contract.answer import Mismatch, SameNames
    from hkv.contract.attach import Observed, Session
    from hkv.contract.case import ShrinkRules
    from hkv.contract.explanation import Explanation
    from hkv.contract.explore_command import ExploreCommand
    from hkv.contract.invariant import Invariant
    from hkv.contract.log import Log, LogFormat
    from hkv.contract.plan_command import PlanCommand
    from hkv.contract.snapshot import Snapshot
    from hkv.contract.traffic import Choices, KeptTraffic
    from hkv.dialects.vllm.lifecycle import Lifecycle
    from hkv.dialects.vllm.log.structs import Header
    from hkv.dialects.vllm.traffic.hit_comparison import HitCase
    from hkv.dialects.vllm.traffic.traffic import Traffic
    from hkv.replay.command import ReplayCommand


class VllmDialect(Dialect):
    """The rules of vLLM 0.33. Modules are imported when they are asked for."""

    names = (NAME,)
    title = "vLLM 0.33"
    versions = (1, 2, 3, 4)
    kinds = kinds.names()
    engines = MappingProxyType(
        {
            "numpy": "hkv.dialects.vllm.engines.numpy:NumpyEngine",
            "text": "hkv.dialects.vllm.engines.plain:PlainEngine",
            "jax": "hkv.dialects.vllm.engines.jax:JaxEngine",
            "vllm": "hkv.dialects.vllm.engines.installed:InstalledVllmEngine",
        }
    )
    engine_versions = MappingProxyType({"vllm": "0.33"})
    default_pair = ("numpy", "vllm")
    default_recorded = "vllm"
    bugs = BUGS
    planned_as = NAME
    move_names = ("next_step", "arrive", "admit", "go_on", "finish", "preempt", "evict", "reset")

    @property
    def log(self) -> LogFormat:
        from hkv.dialects.vllm.log.configuration import FORMAT

        return FORMAT

    def lifecycle(self, header: Header) -> Lifecycle:
        from hkv.dialects.vllm.lifecycle import Lifecycle

        return Lifecycle(header)

    def perform(self, engine: Any, operation: Any) -> Any:
        from hkv.dialects.vllm.engines.engine import apply

        return apply(engine, operation)

    def missing_methods(self, engine: Any, header: Header) -> tuple[str, ...]:
        from hkv.dialects.vllm.engines.engine import missing_methods

        return missing_methods(engine, header.oplog)

    def process_engine(self, process: Process) -> Any:
        from hkv.dialects.vllm.engines.engine import ProcessEngine

        return ProcessEngine(process)

    def compare(self, want: Any, got: Any, version: int) -> Mismatch | None:
        from hkv.dialects.vllm.log.renaming import compare

        return compare(want, got, version)

    def renaming(self, ids: str, header: Header) -> SameNames:
        from hkv.dialects.vllm.log.renaming import renaming

        return renaming(ids, header)

    @property
    def shrink_rules(self) -> ShrinkRules:
        from hkv.dialects.vllm.shrink_rules import SHRINK_RULES

        return SHRINK_RULES

    def drawn_versions(self, kinds: frozenset[str]) -> tuple[int, ...]:
        from hkv.dialects.vllm.kinds import of_kind

        known = max((of_kind(kind).log_version for kind in kinds), default=1)
        return tuple(version for version in self.versions if version >= known)

    def features(self, name: str) -> tuple[str, ...]:
        from hkv.contract.traffic import STEERED
        from hkv.dialects.vllm.traffic.headers import FEATURES, REACHING

        return (STEERED, *REACHING, *FEATURES)

    def kept(self, version: int, name: str) -> Sequence[KeptTraffic]:
        from hkv.dialects.vllm.traffic.headers import kept

        return kept(version)

    def short_features(self, name: str) -> tuple[str, ...]:
        from hkv.dialects.vllm.traffic.headers import FEATURES

        return FEATURES

    def draw_header(
        self, choices: Choices, feature: str, version: int, name: str, kinds: frozenset[str] = frozenset()
    ) -> Header:
        from hkv.dialects.vllm.traffic.headers import draw_header

        return draw_header(choices, feature, version, kinds)

    def drive(self, header: Header, choices: Choices, perform: Callable[[Any], Any], steps: int) -> None:
        from hkv.dialects.vllm.traffic.live import drive

        drive(header, choices, perform, steps)

    def moves(self, header: Header, choices: Choices, perform: Callable[[Any], Any]) -> Traffic:
        from hkv.dialects.vllm.traffic.traffic import Traffic

        return Traffic(header, choices, perform)

    def topology(self, header: Header) -> Topology:
        return Topology.of_specs([spec_from_log(group) for group in header.groups], header.eagle_groups)

    def draw_hit_case(self, choices: Choices) -> HitCase:
        from hkv.dialects.vllm.traffic.hit_comparison import draw_case

        return draw_case(choices)

    @property
    def invariants(self) -> Mapping[str, Invariant]:
        from hkv.dialects.vllm.invariants import INVARIANTS

        return INVARIANTS

    @property
    def capabilities(self) -> Mapping[str, str]:
        from hkv.dialects.vllm.engines.engine import CAPABILITIES

        return CAPABILITIES

    def without(self, answer: Any, lacks: frozenset[str]) -> Any:
        from hkv.dialects.vllm.engines.engine import without

        return without(answer, lacks)

    def watch(self, engine: Any, header: Header) -> Any:
        from hkv.contract.invariant import judged
        from hkv.dialects.vllm.invariants import Watch

        if "state" in (lacks := self.missing_capabilities(engine)):
            raise UnsupportedConfigError("engine", "one without a state", "one with a state, which invariants look at")
        return Watch(engine, header, judged(self.invariants.values(), lacks))

    def watch_log(self, log: Log) -> Any:
        from hkv.dialects.vllm.invariants.watch import LogWatch

        return LogWatch(log)

    def explain(self, log: Log, line: int, request: str | None) -> Explanation:
        from hkv.dialects.vllm.explain.explain import explain

        return explain(log, line, request)

    def difference(self, case: Any) -> str:
        from hkv.dialects.vllm.explain.difference import difference

        return difference(case)

    def snapshot(self, header: Header, state: Any) -> Snapshot:
        from hkv.dialects.vllm.log.snapshot import snapshot

        return snapshot(header, state)

    @property
    def coverage(self) -> Mapping[str, str]:
        from reference.dialects.vllm import clauses

        return {name: clause.meaning for name, clause in clauses().items()}

    def exercised(self, log: Log) -> dict[str, int]:
        from hkv.dialects.vllm.engines.plain import PlainEngine
        from reference.language import recording

        counts: collections.Counter[str] = collections.Counter()
        engine = PlainEngine(log.header)
        with recording(lambda name: counts.update([name])):
            for operation in log.operations:
                with contextlib.suppress(OperationError, EngineFailure):
                    self.perform(engine, operation)
        return dict(counts)

    attached_package = "vllm"

    def ended(self, log: Log) -> str:
        from hkv.dialects.vllm.log.structs import EndOp

        last = log.operations[-1] if log.operations else None
        return last.reason if isinstance(last, EndOp) else ""

    def attach(self, target: Any, session: Session) -> Observed:
        from hkv.dialects.vllm.attach.attach import attach

        return attach(target, session)

    def attach_all(self, session: Session) -> Callable[[], None]:
        from hkv.dialects.vllm.attach.attach import attach_all

        return attach_all(session)

    def plan_command(self) -> PlanCommand:
        from hkv.dialects.vllm.plan_command import VllmPlanCommand

        return VllmPlanCommand()

    def explore_command(self) -> ExploreCommand:
        from hkv.dialects.vllm.explore_command import VllmExploreCommand

        return VllmExploreCommand()

    def replay_command(self) -> ReplayCommand:
        from hkv.dialects.vllm.replay_command import VllmReplayCommand

        return VllmReplayCommand()

    @property
    def vectors(self) -> Mapping[str, tuple[str, Callable[[], Iterator[dict[str, Any]]]]]:
        from hkv.dialects.vllm.vectors import hits, keys, plans

        return {
            "keys": ("chained prefix keys of a request's tokens", keys),
            "hits": ("the longest common prefix hit, by definition and as vLLM 0.33 finds it", hits),
            "plans": ("groups, block counts and tensors for layers and memory", plans),
        }


class EarlierVllmDialect(VllmDialect):
    """The rules of vLLM 0.32: those of 0.33 but for what `VllmConfig` says of it, and hashes that look ahead."""

    names = (EARLIER,)
    title = "vLLM 0.32"
    engine_versions = MappingProxyType({"vllm": "0.32"})
    planned_as = ""
    attached_package = ""

    def features(self, name: str) -> tuple[str, ...]:
        return tuple(each for each in super().features(name) if each != "lookahead_hash")

    def short_features(self, name: str) -> tuple[str, ...]:
        return tuple(each for each in super().short_features(name) if each != "lookahead_hash")

    def draw_header(
        self, choices: Choices, feature: str, version: int, name: str, kinds: frozenset[str] = frozenset()
    ) -> Header:
        header = super().draw_header(choices, feature, version, name, kinds)
        return msgspec.structs.replace(header, dialect=EARLIER, hash_lookahead=0)

    def kept(self, version: int, name: str) -> Sequence[KeptTraffic]:
        later = [each for each in super().kept(version, name) if not each.header.hash_lookahead]
        return [each._replace(header=msgspec.structs.replace(each.header, dialect=EARLIER)) for each in later]

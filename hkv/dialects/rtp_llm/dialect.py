"""RTP-LLM as a dialect, its three allocators under three names: where everything that HKV asks of it stands."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hkv.contract.dialect import Dialect
from hkv.dialects.rtp_llm.bugs import BUGS
from hkv.dialects.rtp_llm.config import NAMES
from hkv.errors import OperationError
from hkv.model.topology import Topology

if TYPE_CHECKING:
    from hkv.contract.case import ShrinkRules
    from hkv.contract.explanation import Explanation
    from hkv.contract.explore_command import ExploreCommand
    from hkv.contract.invariant import Invariant
    from hkv.contract.log import Log, LogFormat
    from hkv.contract.plan_command import PlanCommand
    from hkv.contract.snapshot import Snapshot
    from hkv.contract.traffic import Choices
    from hkv.dialects.rtp_llm.lifecycle import RtpLifecycle
    from hkv.dialects.rtp_llm.log import RtpHeader
    from hkv.dialects.rtp_llm.traffic import RtpTraffic
    from hkv.replay.command import ReplayCommand


class RtpLlmDialect(Dialect):
    """RTP-LLM's rules. Modules are imported when they are asked for."""

    names = NAMES
    title = "RTP-LLM"
    versions = (2,)
    kinds = ("FULL", "LINEAR", "SWA")
    bugs = BUGS
    engines = MappingProxyType(
        {
            "numpy": "hkv.dialects.rtp_llm.engines.numpy:RtpNumpyEngine",
            "jax": "hkv.dialects.rtp_llm.engines.jax:RtpJaxEngine",
        }
    )
    move_names = (
        "arrive",
        "admit",
        "grow",
        "fork",
        "insert",
        "preempt",
        "end",
        "evict",
        "estimate",
        "connect",
        "state",
    )
    planned_as = "rtp-llm"

    @property
    def log(self) -> LogFormat:
        from hkv.dialects.rtp_llm.log import FORMAT

        return FORMAT

    def lifecycle(self, header: RtpHeader) -> RtpLifecycle:
        from hkv.dialects.rtp_llm.lifecycle import RtpLifecycle

        return RtpLifecycle()

    @property
    def shrink_rules(self) -> ShrinkRules:
        from hkv.dialects.rtp_llm.shrink_rules import RTP_SHRINK_RULES

        return RTP_SHRINK_RULES

    def summary(self, header: RtpHeader) -> str:
        groups = ", ".join(f"{kind}:{size}" for kind, size in self.groups(header))
        return f"{' and '.join(map(str, header.num_blocks))} blocks, groups {groups}"

    def groups(self, header: RtpHeader) -> Sequence[tuple[str, int]]:
        return [(group.type, group.block_size) for group in header.groups]

    def features(self, name: str) -> tuple[str, ...]:
        from hkv.dialects.rtp_llm.traffic import rtp_features

        return rtp_features(name)

    def draw_header(
        self, choices: Choices, feature: str, version: int, name: str, kinds: frozenset[str] = frozenset()
    ) -> RtpHeader:
        from hkv.dialects.rtp_llm.traffic import draw_rtp_header

        return draw_rtp_header(choices, feature, name)

    def drive(self, header: RtpHeader, choices: Choices, perform: Callable[[Any], Any], steps: int) -> None:
        from hkv.dialects.rtp_llm.traffic import drive_rtp

        drive_rtp(header, choices, perform, steps)

    def moves(self, header: RtpHeader, choices: Choices, perform: Callable[[Any], Any]) -> RtpTraffic:
        from hkv.dialects.rtp_llm.traffic import RtpTraffic

        return RtpTraffic(header, choices, perform)

    def topology(self, header: RtpHeader) -> Topology:
        from hkv.dialects.rtp_llm.log import to_rtp_config

        return to_rtp_config(header).topology

    @property
    def invariants(self) -> Mapping[str, Invariant]:
        from hkv.dialects.rtp_llm.invariants import RTP_INVARIANTS

        return RTP_INVARIANTS

    def watch(self, engine: Any, header: RtpHeader) -> Any:
        from hkv.dialects.rtp_llm.invariants import RtpWatch

        return RtpWatch(engine, header)

    def explain(self, log: Log, line: int, request: str | None) -> Explanation:
        from hkv.dialects.rtp_llm.explain import explain_rtp

        return explain_rtp(log, line, request)

    def snapshot(self, header: RtpHeader, state: Any) -> Snapshot:
        from hkv.dialects.rtp_llm.snapshot import snapshot

        return snapshot(header, state)

    @property
    def coverage(self) -> Mapping[str, str]:
        from reference.dialects.rtp_llm import clauses

        return {name: clause.meaning for name, clause in clauses().items()}

    def exercised(self, log: Log) -> dict[str, int]:
        from hkv.dialects.rtp_llm.engines.numpy import RtpNumpyEngine
        from reference.language import recording

        counts: collections.Counter[str] = collections.Counter()
        engine = RtpNumpyEngine(log.header)
        with recording(lambda name: counts.update([name])):
            for operation in log.operations:
                with contextlib.suppress(OperationError):
                    engine.perform(operation)
        return dict(counts)

    def plan_command(self) -> PlanCommand:
        from hkv.dialects.rtp_llm.plan_command import RtpPlanCommand

        return RtpPlanCommand()

    def explore_command(self) -> ExploreCommand:
        from hkv.dialects.rtp_llm.explorer import RtpExploreCommand

        return RtpExploreCommand()

    def replay_command(self) -> ReplayCommand:
        from hkv.dialects.rtp_llm.replay_command import RtpReplayCommand

        return RtpReplayCommand()

"""vLLM's second tier as a dialect: where everything that HKV asks of it stands."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hkv.contract.dialect import Dialect
from hkv.dialects.vllm.offload import log as structs
from hkv.dialects.vllm.offload.config import BUGS, SIMPLE
from hkv.errors import EngineFailure, OperationError

if TYPE_CHECKING:
    from hkv.contract.attach import Observed, Session
    from hkv.contract.case import ShrinkRules
    from hkv.contract.explanation import Resumption
    from hkv.contract.invariant import Invariant, PlainWatch
    from hkv.contract.log import Lifecycle, LogFormat
    from hkv.contract.snapshot import Snapshot
    from hkv.contract.traffic import Choices, Moves


class OffloadDialect(Dialect):
    """Rules of vLLM 0.33.0's `OffloadingConnector`. Modules are imported when they are asked for."""

    names = structs.NAMES
    title = "vLLM 0.33's offloading"
    kinds = ("full_attention", "mla", "sliding_window", "chunked_local", "mamba")
    engines = MappingProxyType(
        {
            "numpy": "hkv.dialects.vllm.offload.numpy:engine",
            "vllm-offload": "hkv.dialects.vllm.offload.installed:engine",
        }
    )
    engine_versions = MappingProxyType({"vllm-offload": "0.33.0"})
    default_pair = ("vllm-offload", "numpy")
    bugs = BUGS
    attached_package = "vllm"
    move_names = ("store", "begin", "load", "done", "end", "clear", "events", "state")

    @property
    def log(self) -> LogFormat:
        return structs.FORMAT

    def attach(self, target: Any, session: Session) -> Observed:
        from hkv.dialects.vllm.offload.attach import attach

        return attach(target, session)

    def attach_all(self, session: Session) -> Callable[[], None]:
        from hkv.dialects.vllm.offload.attach import attach_all

        return attach_all(session)

    def lifecycle(self, header: structs.Header) -> Lifecycle:
        from hkv.dialects.vllm.offload.lifecycle import lifecycle

        return lifecycle(header)

    @property
    def shrink_rules(self) -> ShrinkRules:
        from hkv.dialects.vllm.offload.shrink_rules import SHRINK_RULES

        return SHRINK_RULES

    def features(self, name: str) -> tuple[str, ...]:
        from hkv.dialects.vllm.offload.traffic import POOL_FEATURES, SCHEDULER_FEATURES

        return POOL_FEATURES if name == structs.CHUNKS else SCHEDULER_FEATURES

    def draw_header(
        self, choices: Choices, feature: str, version: int, name: str, kinds: frozenset[str] = frozenset()
    ) -> structs.Header:
        from hkv.dialects.vllm.offload.traffic import draw_header

        return draw_header(choices, feature, name)

    def drive(self, header: structs.Header, choices: Choices, perform: Callable[[Any], Any], steps: int) -> None:
        from hkv.dialects.vllm.offload.traffic import drive

        drive(header, choices, perform, steps)

    def moves(self, header: structs.Header, choices: Choices, perform: Callable[[Any], Any]) -> Moves:
        from hkv.dialects.vllm.offload.traffic import PoolTraffic, StepTraffic

        return (PoolTraffic if header.dialect == structs.CHUNKS else StepTraffic)(header, choices, perform)

    @property
    def invariants(self) -> Mapping[str, Invariant]:
        from hkv.dialects.vllm.offload.invariants import INVARIANTS

        return INVARIANTS

    def watch(self, engine: Any, header: structs.Header) -> PlainWatch:
        from hkv.contract.invariant import PlainWatch

        return PlainWatch(engine, header, self.invariants.values(), structs.StateOp())

    @property
    def coverage(self) -> Mapping[str, str]:
        from reference.dialects.vllm.offload import clauses

        return {name: clause.meaning for name, clause in clauses().items()}

    def exercised(self, log: Any) -> dict[str, int]:
        from hkv.dialects.vllm.offload.numpy import engine
        from reference.language import recording

        counts, asked = collections.Counter[str](), engine(log.header)
        with recording(lambda name: counts.update([name])):
            for operation in log.operations:
                with contextlib.suppress(OperationError, EngineFailure):
                    asked.perform(operation)
        return {name: count for name, count in counts.items() if name in self.coverage}

    def warnings(self, log: Any) -> Sequence[str]:
        if log.header.dialect != structs.OFFLOAD or log.header.connector == SIMPLE:
            return ()  # what is warned of are the native connector's ways
        from hkv.dialects.vllm.offload.found_again import warnings

        prompts = (len(each.tokens) for each in log.operations if isinstance(each, structs.RequestOp))
        return warnings(structs.to_config(log.header), max(prompts, default=1))

    def snapshot(self, header: structs.Header, state: structs.State) -> Snapshot:
        from hkv.dialects.vllm.offload.snapshot import snapshot

        return snapshot(header, state)

    def resumptions(self, engine: Any, operation: Any, id: str) -> Sequence[Resumption]:
        if not hasattr(engine, "resumptions"):
            raise self.unsupported("explanations: a pool by itself has no hits")
        return engine.resumptions(id)

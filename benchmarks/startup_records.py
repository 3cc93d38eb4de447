"""Starts of vLLM as plain values: a model, options and what vLLM made of them, to hold HKV's own plan against."""

from __future__ import annotations

import dataclasses
import gzip
import json
import pathlib
from collections.abc import Mapping
from typing import Any, Protocol

from hkv.dialects.vllm.planning.cache_plan import CachePlan
from hkv.dialects.vllm.planning.engine_options import EngineOptions
from hkv.dialects.vllm.planning.engine_plan import plan_config
from hkv.dialects.vllm.planning.speculation import speculation_of
from hkv.errors import HKVError

SETTINGS = (
    "max_num_batched_tokens",
    "max_num_seqs",
    "async_scheduling",
    "max_concurrent_batches",
    "max_in_flight_tokens",
    "enable_prefix_caching",
    "disable_hybrid_kv_cache_manager",
    "memory",
)
"""Settings of vLLM's that HKV has under the same names."""


def records_by_model(path: pathlib.Path) -> dict[str, list[dict[str, Any]]]:
    """Starts by model, from a file that `benchmarks/compare_startup.py --record` wrote, compressed."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in gzip.decompress(path.read_bytes()).splitlines():
        record = json.loads(line)
        found.setdefault(record["model"], []).append(record)
    return found


class Asked(Protocol):
    """A model under options."""

    @property
    def model(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def usage_context(self) -> str: ...
    @property
    def options(self) -> Mapping[str, Any]: ...
    @property
    def memory(self) -> Mapping[str, int]: ...


@dataclasses.dataclass(frozen=True)
class StartupDifference:
    """A value in which HKV and vLLM differ.

    Attributes:
      field: its name.
      ours: HKV's.
      theirs: vLLM's.
    """

    field: str
    ours: Any
    theirs: Any

    def __str__(self) -> str:
        return f"{self.field}: {self.ours} here, {self.theirs} in vLLM"


def question_record(question: Asked, answer: Mapping[str, Any]) -> dict[str, Any]:
    """A question and vLLM's answer as plain values."""
    return {
        "model": question.model,
        "device": question.device,
        "usage_context": question.usage_context,
        "options": dict(question.options),
        "memory": dict(question.memory),
        "vllm": dict(answer),
    }


def options_of(record: Mapping[str, Any]) -> EngineOptions:
    """The options of a record, of which those of vLLM's own have the names of `EngineArgs`.

    Raises:
      HKVError: HKV has no such value.
    """
    options = dict(record["options"])
    speculation = options.pop("speculative_config", None)
    memory = dict(record["memory"])
    return EngineOptions(
        device=record["device"],
        usage_context=record["usage_context"],
        kv_cache_memory_bytes=memory.pop("memory", None),
        speculation=speculation and speculation_of(speculation),
        **memory,
        **options,
    )


def difference(config: Mapping[str, Any], record: Mapping[str, Any]) -> StartupDifference | None:
    """The first value in which HKV's plan differs from vLLM's, or None.

    Args:
      config: the model's `config.json`.
      record: the options, and vLLM's answer.
    """
    theirs = record["vllm"]
    try:
        plan = plan_config(config, options_of(record))
    except HKVError as error:
        return None if "refused" in theirs else StartupDifference("refused", str(error), theirs["line"])
    if "refused" in theirs:
        return StartupDifference("planned", plan.startup.line, theirs["refused"])
    ours = _values(plan)
    return next(
        (StartupDifference(name, ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]), None
    )


def _values(plan: CachePlan) -> dict[str, Any]:
    """Values that both say."""
    return {
        **{name: getattr(plan.settings, name) for name in SETTINGS},
        "memory": plan.settings.memory.stages[0],
        "max_model_len": plan.max_model_len,
        "num_blocks": plan.num_blocks,
        "concurrency": plan.concurrency,
        "tokens": plan.tokens,
        "line": plan.startup.line,
    }

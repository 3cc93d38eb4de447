"""`hkv plan` under vLLM 0.33's rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from hkv.byte_size import parse_bytes
from hkv.contract.plan_command import Capacity, ModelPlan, PlanCommand
from hkv.dialects.vllm.planning.cache_plan import CachePlan
from hkv.dialects.vllm.planning.capacity import capacity_of
from hkv.dialects.vllm.planning.engine_options import EngineOptions, reported_memory
from hkv.dialects.vllm.planning.engine_plan import plan_config
from hkv.dialects.vllm.planning.serve_options import (
    batch_options,
    cache_options,
    memory_options,
    parallel_options,
    size_of_weights,
    speculation_of_options,
)
from hkv.dialects.vllm.planning.tables import print_served
from hkv.errors import PlanError
from hkv.model.released import find
from hkv.request_length import parse_length


class VllmPlanCommand(PlanCommand):
    """One pool of blocks, what fits, and what vLLM says at start-up. Options are `vllm serve`'s, and its defaults."""

    replays_workloads = True

    def options(self) -> Sequence[click.Option]:
        return (*memory_options(), *batch_options(), *cache_options(), *parallel_options())

    def plan(self, memory: int | None, options: dict[str, Any]) -> ModelPlan:
        planned = _planned(memory, options)
        report = planned.report()
        return ModelPlan(report, lambda console: print_served(console, report, planned.served))

    def serve_line(self, options: dict[str, Any], engines: int) -> str:
        released = find(options["config"])
        words = ["vllm serve", options["config"] if released is None else released.ids[0]]
        flags = {
            "--tensor-parallel-size": options["tp"] if options["tp"] > 1 else None,
            "--pipeline-parallel-size": options["pp"] if options["pp"] > 1 else None,
            "--data-parallel-size": engines if engines > 1 else None,
            "--max-model-len": options["max_model_len"],
            "--kv-cache-dtype": None if options["kv_dtype"] == "auto" else options["kv_dtype"],
        }
        return " ".join([*words, *(f"{name} {value}" for name, value in flags.items() if value is not None)])

    def capacity(self, memory: int | None, options: dict[str, Any]) -> Capacity:
        return capacity_of(_planned(memory, options))


def _planned(memory: int | None, options: dict[str, Any]) -> CachePlan:
    return plan_config(options["config"], engine_options(memory, options), bugs=options["bugs"])


def engine_options(memory: int | None, options: dict[str, Any]) -> EngineOptions:
    """The engine's options that those of `hkv plan` mean."""
    gpu_memory = _size(options, "gpu_memory")
    if gpu_memory is None and "device" in options["given"]:
        gpu_memory = reported_memory(options["device"])
        if gpu_memory is None and memory is None:
            expected = (
                f"what nvidia-smi says of one {options['device']}: no public report of its memory is known to HKV"
            )
            raise PlanError("--gpu-memory", None, expected)
    length = 0 if options["max_model_len"] == "-1" else parse_length(options["max_model_len"])
    same = (
        "device",
        "usage_context",
        "gpu_memory_utilization",
        "num_gpu_blocks_override",
        "data_parallel_size",
        "enable_expert_parallel",
        "all2all_backend",
        "max_num_batched_tokens",
        "max_num_seqs",
        "enable_chunked_prefill",
        "async_scheduling",
        "performance_mode",
        "enable_prefix_caching",
        "disable_hybrid_kv_cache_manager",
        "block_size",
        "prefix_match_unit",
        "gdn_prefill_backend",
        "kda_prefill_backend",
        "dtype",
        "state_dtype",
        "kernel_block_size",
        "ignore_fields",
        "strict",
    )
    return EngineOptions(
        **{name: options[name] for name in same},
        gpu_memory=gpu_memory,
        gpu_memory_reported=options["gpu_memory"] is None,
        activations=_size(options, "activations"),
        weights=size_of_weights(options["weights"], options["tp"] * options["pp"]),
        kv_cache_memory_bytes=memory,
        tensor_parallel_size=options["tp"],
        pipeline_parallel_size=options["pp"],
        decode_context_parallel_size=options["dcp"],
        max_model_len=-1 if length == 0 else length,
        max_in_flight_tokens=options["max_in_flight"],
        kv_cache_layout=options["layout"],
        kv_cache_dtype=options["kv_dtype"],
        speculation=speculation_of_options(options),
    )


def _size(options: dict[str, Any], name: str) -> int | None:
    text = options[name]
    return None if text is None else parse_bytes(text, f"--{name.replace('_', '-')}")

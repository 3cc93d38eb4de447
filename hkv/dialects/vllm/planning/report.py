"""A plan as plain values for `hkv plan --json`: groups, what fits, and the shape and strides of every tensor."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from hkv.contract.plan_command import model_record
from hkv.dialects.vllm.planning.engine_settings import EngineSettings
from hkv.dialects.vllm.planning.memory import CacheMemory
from hkv.dialects.vllm.planning.plan import CacheTensor, Plan, PlannedGroup
from hkv.dialects.vllm.planning.served import ServedPlan
from hkv.dialects.vllm.planning.startup import startup, why_counts_differ
from hkv.dialects.vllm.planning.tensors import group_record, plan_record, tensor_record
from hkv.errors import LayoutError
from hkv.layout.block_layout import Layout
from hkv.model.huggingface import Model


def tensor_layout(tensor: CacheTensor, plan: Plan, kernel_block_size: int = 0) -> Layout:
    """The layout of a tensor, its blocks cut into kernel blocks where its kind has any.

    Args:
      tensor: one of the plan's.
      plan: the plan.
      kernel_block_size: tokens of a kernel block, 0 for the whole block.

    Raises:
      LayoutError: the blocks cannot be cut so.
    """
    spec = tensor.spec
    split = None
    if kernel_block_size and not spec.snapshot and spec.prefix_cacheable:
        if spec.block_size % kernel_block_size and kernel_block_size % spec.block_size:
            raise LayoutError("kernel_block_size", kernel_block_size, f"a divisor of the {spec.block_size}-token block")
        split = min(kernel_block_size, spec.block_size)
    return Layout.of_spec(
        spec,
        plan.layout,
        num_blocks=plan.num_blocks,
        num_layers=len(tensor.layers),
        layer_stride=tensor.layer_stride,
        block_stride=tensor.block_stride,
        offset=tensor.offset,
        kernel_block_size=split,
    )


def served_report(
    model: Model, served: ServedPlan, settings: EngineSettings, kernel_block_size: int = 0
) -> dict[str, Any]:
    """Everything that `hkv plan` knows, as plain values. Sizes in bytes; shapes and strides in the order L, B, H, N, C.

    Args:
      model: the model.
      served: its plan.
      settings: settings that the engine starts with.
      kernel_block_size: tokens of a kernel block, 0 for the whole block.
    """
    plan, residency = served.plan, served.residency
    report = plan_record(plan)
    report["model"] = model_record(model, plan.max_model_len)
    report["startup"] = _startup_record(served)
    report["settings"] = settings_record(settings)
    report["memory"] = memory_record(settings.memory)
    report["bytes_per_block"] = max((worker.bytes_per_block for worker in plan.workers), default=0)
    report["groups"] = [
        group_record(group)
        | {
            "kind": group.spec.kind,
            "class": type(group.spec).__name__,
            "bytes_per_block": group.page_bytes,
            "padding_bytes": group.page_bytes - group.payload_bytes,
            "unused_bytes": report["bytes_per_block"] - group.page_bytes,
            "full_length_blocks": residency.full_length_blocks[index],
            "peak_blocks": residency.peak_blocks[index],
        }
        for index, group in enumerate(plan.groups)
    ]
    report["tensors"] = [
        [
            tensor_record(tensor)
            | {"shape": list(layout.shape), "strides": list(layout.strides), "dtype": layout.dtype}
            for tensor in worker.tensors
            for layout in [tensor_layout(tensor, plan, kernel_block_size)]
        ]
        for worker in plan.workers
    ]
    report["fits"] = {
        "requests": residency.requests,
        "tokens": residency.requests * plan.max_model_len,
        "peak_usage_blocks": residency.peak_usage,
        "reserved_concurrency": plan.reserved_concurrency if plan.request_blocks else None,
        "limited_by": served.limited_by,
    }
    return report


def _startup_record(served: ServedPlan) -> dict[str, Any]:
    """The two numbers that vLLM itself prints, and why HKV's count is another."""
    said = startup(served.plan)
    nothing = not said.line
    return {
        "gpu_kv_cache_size_tokens": said.tokens,
        "max_concurrency": None if nothing else said.concurrency,
        "line": said.line,
        "why_simulation_differs": why_counts_differ(served.plan, served.residency),
    }


def settings_record(settings: EngineSettings) -> dict[str, Any]:
    """Settings of the engine, and the options that they mean, each with its origin if nobody asked for it."""
    record = dataclasses.asdict(settings)
    record["memory"] = min(settings.memory.stages)
    record["settings"] = [{"option": each.option, "origin": each.origin} for each in settings.settings]
    return record


def memory_record(memory: CacheMemory) -> dict[str, Any]:
    """Bytes for the cache on the GPUs of each stage, and what they are left over from, each with its origin."""
    return {
        "cache": {"stages": list(memory.stages), "most": list(memory.most), "origin": memory.origin},
        "taken": memory.taken or None,
        "unpacked": memory.unpacked or None,
        **{name: [dataclasses.asdict(part) for part in parts] for name, parts in memory.parts.items()},
    }


def runs(names: tuple[str, ...] | list[str]) -> str:
    """Names of layers, shortened: `0,4..44 (12)` for evenly spaced numbers, `3.state and 19 more` for anything else."""
    short = [name.removeprefix("layers.") for name in names]
    if len(names) < 3:
        return ",".join(short)
    numbers = [name.partition(".")[0] for name in short]
    suffixes = [name.partition(".")[2] for name in short]
    if len(set(suffixes)) > 1 or not all(number.isdigit() for number in numbers):
        return f"{short[0]} and {len(names) - 1} more"
    steps = {int(after) - int(before) for before, after in itertools.pairwise(numbers)}
    middle = ".." if steps == {1} else f",{numbers[1]}.." if len(steps) == 1 else f",{numbers[1]},..,"
    suffix = f" {suffixes[0]}" if suffixes[0] else ""
    return f"{numbers[0]}{middle}{numbers[-1]}{suffix} ({len(names)})"


def waste(group: PlannedGroup, bytes_per_block: int) -> float:
    """Share of a block's bytes that the group leaves unused: padding of pages, and the room up to the widest group."""
    return 1 - group.payload_bytes / bytes_per_block if bytes_per_block else 0.0

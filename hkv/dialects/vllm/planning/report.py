"""A plan as plain values for `hkv plan --json`: groups, what fits, and the shape and strides of every tensor."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from hkv.contract.plan_command import model_record
from hkv.dialects.vllm.planning.engine_settings import EngineSettings
from hkv.dialects.vllm.planning.memory import CacheMemory
from hkv.dialects.vllm.planning.plan import CacheTensor, Plan, PlannedGroup
from hkv.dialects.vllm.planning.residency import Residency
from hkv.dialects.vllm.planning.served import ServedPlan
from hkv.dialects.vllm.planning.tensors import group_record, plan_record, tensor_record
from hkv.errors import LayoutError
from hkv.layout.block_layout import Layout
from hkv.model.huggingface import Model


def tensor_layout(tensor: CacheTensor, plan: Plan, kernel_block_size: int = 0) -> Layout:
    """The layout of a tensor, its blocks cut into kernel blocks where its kind has any."""
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
    """Everything that `hkv plan` knows. Sizes are in bytes, shapes and strides in the order L, B, H, N, C."""
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


# The two numbers that vLLM 0.33 logs at start-up, to the digit, and how HKV's own count differs from them.


@dataclasses.dataclass(frozen=True)
class Startup:
    """Numbers that vLLM 0.33 logs of its cache (`update_kv_cache_capacity`).

    Attributes:
      tokens: `GPU KV cache size`.
      concurrency: `Maximum concurrency for ... tokens per request`; infinite for a model that caches nothing, of which
        vLLM says nothing.
      max_model_len: tokens of the longest request.
    """

    tokens: int
    concurrency: float
    max_model_len: int

    @property
    def line(self) -> str:
        """The line of the log; empty for a model that caches nothing."""
        if self.concurrency == float("inf"):
            return ""
        return (
            f"GPU KV cache size: {self.tokens:,} tokens, Maximum concurrency for {self.max_model_len:,} tokens per "
            f"request: {self.concurrency:.2f}x"
        )


def startup(plan: Plan) -> Startup:
    """The numbers for a plan (vLLM 0.33 `get_kv_cache_capacity`, `get_max_concurrency_for_kv_cache_config`).

    Blocks are all of the pool's, the null block among them; a request takes what is reserved for its longest length.
    """
    length = plan.max_model_len
    if not plan.request_blocks:
        return Startup(0, float("inf"), length)
    concurrency = plan.num_blocks / plan.request_blocks
    return Startup(int(concurrency * length), concurrency, length)


def why_counts_differ(plan: Plan, residency: Residency) -> str:
    """One sentence that says why the simulated number of requests is not vLLM's; empty if both are the same.

    The first of these that holds is said: fewer blocks are held at the end of a request than are reserved for its
    course, or the pool's null block and the part of a request that is left over count in vLLM's number only.
    """
    if not plan.request_blocks:
        return ""
    concurrency = plan.num_blocks / plan.request_blocks
    if f"{concurrency:.2f}" == f"{residency.requests:.2f}":
        return ""
    held = sum(residency.full_length_blocks)
    encoded = max((group.spec.encoder_tokens for group in plan.groups), default=0)
    if held < plan.request_blocks and encoded:
        return (
            f"vLLM reserves {plan.request_blocks} blocks for each request, as if its encoder's output were as long as "
            f"a step; with {encoded} tokens of it, as the model makes at most, a request holds {held}."
        )
    if held < plan.request_blocks:
        return (
            f"vLLM reserves {plan.request_blocks} blocks for each request, as if each were computing its prompt with "
            f"all tokens in flight; HKV lets them run, and those that have come to their last token hold {held}."
        )
    return (
        f"vLLM divides all {plan.num_blocks} blocks by the {plan.request_blocks} of a request; HKV counts whole "
        "requests in the blocks that are not the null block."
    )

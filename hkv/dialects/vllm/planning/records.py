"""Options and plans as plain values, for files that outlive a version of the code."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hkv.dialects.vllm.planning.options import PlanOptions
from hkv.dialects.vllm.planning.plan import CacheTensor, Plan, PlannedGroup
from hkv.spec import RequestLimits


def options_record(options: PlanOptions) -> dict[str, Any]:
    """Options as plain values."""
    record = dataclasses.asdict(options)
    record["bugs"] = sorted(options.bugs)
    record["supported_layouts"] = None if options.supported_layouts is None else list(options.supported_layouts)
    return record


def options_of(record: Mapping[str, Any]) -> PlanOptions:
    """The options of a record."""
    fields = dict(record)
    fields["limits"] = RequestLimits(**fields["limits"])
    fields["bugs"] = frozenset(fields.get("bugs", ()))
    if fields.get("supported_layouts") is not None:
        fields["supported_layouts"] = tuple(fields["supported_layouts"])
    return PlanOptions(**fields)


def plan_record(plan: Plan) -> dict[str, Any]:
    """A plan as plain values: what `hkv plan --json` writes and what installed engines are compared on."""
    return {
        "num_blocks": plan.num_blocks,
        "layout": plan.layout,
        "scheduler_block_size": plan.scheduler_block_size,
        "hash_block_size": plan.hash_block_size,
        "max_model_len": plan.max_model_len,
        "request_blocks": plan.request_blocks,
        "tp_replicas": [worker.tp_replicas for worker in plan.workers],
        "needs_zeroing": plan.needs_zeroing,
        "groups": [group_record(group) for group in plan.groups],
        "tensors": [[tensor_record(tensor) for tensor in worker.tensors] for worker in plan.workers],
    }


def group_record(group: PlannedGroup) -> dict[str, Any]:
    """A group as plain values."""
    return {
        "layers": list(group.names),
        "mixed": group.mixed,
        "eagle": group.eagle,
        "block_size": group.spec.block_size,
        "page_bytes": group.spec.page_size_bytes if not group.mixed else [s.page_size_bytes for s in group.specs],
        "payload_bytes": (
            group.spec.unpadded_page_size_bytes
            if not group.mixed
            else [s.unpadded_page_size_bytes for s in group.specs]
        ),
    }


def tensor_record(tensor: CacheTensor) -> dict[str, Any]:
    """A tensor as plain values."""
    return {
        "layers": list(tensor.layers),
        "layer_stride": tensor.layer_stride,
        "block_stride": tensor.block_stride,
        "offset": tensor.offset,
        "size": tensor.size,
    }

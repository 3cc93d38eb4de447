"""RTP-LLM's plan as plain values for `hkv plan --json`."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

from hkv.contract.plan_command import Capacity, model_record
from hkv.dialects.rtp_llm.planned_cache import PlannedCache
from hkv.dialects.rtp_llm.planning.options import RtpOptions
from hkv.dialects.rtp_llm.planning.pools import PoolGroup, PoolPlan
from hkv.model.group_policy import GroupType
from hkv.model.huggingface import Model


@dataclasses.dataclass(frozen=True)
class PlannedModel:
    """A model, its planned cache, and what fits into it.

    Attributes:
      model: the model.
      cache: its cache.
      options: the settings that it was planned for.
      capacity: requests that fit.
      reserve_ratio: percent of the blocks that a first allocation leaves free.
    """

    model: Model
    cache: PlannedCache
    options: RtpOptions
    capacity: Capacity
    reserve_ratio: int


def pool_report(planned: PlannedModel) -> dict[str, Any]:
    """RTP-LLM's plan as plain values."""
    model, plan, options, fits = planned.model, planned.cache.plan, planned.options, planned.capacity
    return {
        "model": {
            **model_record(model),
            "token_bytes_if_all_full": _whole_token_bytes(model, plan) / plan.ranks,
            "token_bytes": float(plan.token_bytes),
            "sequence_bytes": plan.sequence_bytes,
            "tensor_parallel": options.tensor_parallel,
        },
        "role": options.role,
        "pools": "shared" if plan.shared else "independent",
        "num_blocks": plan.num_blocks,
        "bytes_per_block": plan.bytes_per_block,
        "tail_bytes_per_block": plan.tail_bytes_per_block,
        "reserve_bytes": plan.reserve_bytes,
        "memory": plan.memory,
        "ranks": plan.ranks,
        "token_capacity": plan.token_capacity,
        "max_model_len": fits.max_model_len,
        "concurrency": fits.concurrency,
        "requests": fits.requests,
        "reserve_ratio": planned.reserve_ratio,
        "groups": [{**_pool_group(group), "tokens_per_slot": plan.tokens_per_slot(group)} for group in plan.groups],
        "draft_modules": [[_pool_group(group) for group in module] for module in plan.modules],
    }


def _whole_token_bytes(model: Model, plan: PoolPlan) -> int:
    """Bytes of a token if every layer were full attention, all ranks together.

    A state counts as a layer of the first full group.
    """
    if any(group.block.entries for group in plan.groups):
        return model.full_token_bytes  # an opaque region's vectors have no scales beside them
    full = next((group for group in plan.groups if group.policy.group_type is GroupType.FULL), None)
    total = Fraction(0)
    for group in plan.groups:
        one = full if group.policy.group_type is GroupType.LINEAR else group
        if one is None:
            return model.full_token_bytes
        total += Fraction(len(group.layers) * (one.block.bytes + one.block.scale), one.block.seq_size)
    return int(total)


def _pool_group(group: PoolGroup) -> dict[str, Any]:
    return {
        "tag": group.tag,
        "type": group.policy.group_type.name,
        "kind": group.block.kind,
        "layers": list(group.layers),
        "block_size": group.block.seq_size,
        "kernel_blocks": group.kernel_blocks,
        "block_bytes": group.block.bytes,
        "payload_bytes": group.block.payload,
        "scale_bytes": group.block.scale,
        "stride": group.stride,
        "scale_stride": group.scale_stride,
        "padding_bytes": group.padding_bytes,
        "num_blocks": group.num_blocks,
    }

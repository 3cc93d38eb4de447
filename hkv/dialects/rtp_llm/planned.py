"""Conversion of RTP-LLM's memory plan to a cache's configuration. Host-only."""

from __future__ import annotations

from typing import Any

from hkv.dialects.rtp_llm.config import RtpConfig
from hkv.dialects.rtp_llm.planning import PoolGroup, PoolPlan
from hkv.model.topology import Group, Topology
from hkv.spec import LayerSpec


def config_of_plan(plan: PoolPlan, **fields: Any) -> RtpConfig:
    """The configuration of a cache in a plan's pools, with further fields; layers are `layers.0`, `layers.1`, ...."""
    groups = tuple(
        Group(
            tag=group.tag,
            spec=_spec(group),
            layers=tuple(f"layers.{index}" for index in group.layers),
            policy=group.policy,
            kernel_block_size=group.block.seq_size // group.kernel_blocks,
        )
        for group in plan.groups
    )
    topology = Topology(groups, pools="shared" if plan.shared else "independent")
    counts = (plan.num_blocks,) if plan.shared else tuple(group.num_blocks for group in plan.groups)
    ranks = {"cp_size": plan.ranks, "prefill_cp_size": plan.prefill_ranks}
    return RtpConfig(topology=topology, num_blocks=counts, **{**ranks, **fields})


def _spec(group: PoolGroup) -> LayerSpec:
    """The group's layer, with the bytes of a whole block where its size is that of a kernel block."""
    spec = group.block.spec
    return spec.sized(page_size=group.stride) if group.block.entries else spec

"""Conversion of RTP-LLM's memory plan to a cache's configuration. Host-only."""

from __future__ import annotations

from typing import Any

from hkv.dialects.rtp_llm.config import RtpConfig
from hkv.dialects.rtp_llm.planning import PoolGroup, PoolPlan
from hkv.model.topology import Group, Topology
from hkv.spec import FullAttention, LayerSpec, Mamba, MLAAttention, OpaqueState

_ELEMENTS = {1: "float8_e4m3fn", 2: "bfloat16", 4: "float32"}
"""An element type of each size; a plan knows bytes, and only they matter to a configuration."""


def config_of_plan(plan: PoolPlan, **fields: Any) -> RtpConfig:
    """The configuration of a cache in the pools of a plan.

    Args:
      plan: groups, policies, pools and block counts. Layers are called by their index: `layers.0`, `layers.1`, ....
      **fields: further fields of `RtpConfig`, such as `linear_step` or `prefix_tree`.

    Raises:
      HKVError: a configuration that the dialect forbids.
    """
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
    return RtpConfig(topology=topology, num_blocks=counts, **{"cp_size": plan.ranks, **fields})


def _spec(group: PoolGroup) -> LayerSpec:
    """A layer that takes up as many bytes as the group's."""
    block = group.block
    tokens = block.seq_size
    if block.kind == "linear":
        return Mamba(block_size=tokens, shapes=((block.bytes,),), dtypes=("uint8",))
    if block.kind in ("opaque_kv", "opaque_state"):
        return OpaqueState(block_size=tokens, page_size_padded=group.stride)
    element = _ELEMENTS[block.bytes // block.elems]
    if block.kind == "mla":
        return MLAAttention(block_size=tokens, num_kv_heads=1, head_size=block.elems // tokens, dtype=element)
    size = block.k_elems // (tokens * block.local_heads)
    return FullAttention(block_size=tokens, num_kv_heads=block.local_heads, head_size=size, dtype=element)

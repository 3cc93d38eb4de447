"""The block manager's configuration that a plan leads to, for those who go on to run requests through it."""

from __future__ import annotations

from hkv.dialects.vllm.config import VllmConfig, default_partial_hits
from hkv.dialects.vllm.planning.plan import Plan
from hkv.errors import PlanError
from hkv.model.topology import Topology
from hkv.spec import RequestLimits


def cache_config(plan: Plan, limits: RequestLimits, *, caching: bool = True) -> VllmConfig:
    """The configuration under which vLLM 0.33's scheduler manages the plan's blocks.

    A mixed group is managed by its first layer (vLLM 0.33 `generate_scheduler_kv_cache_config`).

    Args:
      plan: the plan.
      limits: limits that it was made for, `max_model_len` as planned.
      caching: whether prefix caching is on.

    Raises:
      PlanError: the plan has no groups.
      ConfigError: the rules forbid such a cache.
    """
    if not plan.groups:
        raise PlanError("plan", plan.groups, "at least one group to manage")
    groups = plan.topology_groups()
    specs = [group.spec for group in groups]
    ranks = limits.context_parallel
    return VllmConfig(
        topology=Topology(groups),
        num_blocks=plan.num_blocks,
        hash_block_size=plan.hash_block_size,
        scheduler_block_size=plan.scheduler_block_size,
        caching=caching,
        eagle=any(group.eagle for group in groups),
        partial_hits=default_partial_hits(specs, plan.hash_block_size, ranks, caching),
        max_model_len=limits.max_model_len,
        max_in_flight_tokens=limits.max_in_flight_tokens,
        context_parallel=ranks,
    )

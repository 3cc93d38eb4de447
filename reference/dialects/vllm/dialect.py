"""The record of vLLM 0.33's rules in the reference's form."""

from __future__ import annotations

from hkv.dialects.vllm.config import NAME
from reference.dialects.rules import Rules, RuleSet
from reference.dialects.vllm import coordinator
from reference.dialects.vllm.kinds import all_kinds
from reference.dialects.vllm.kinds.kind import Kind

VLLM: RuleSet[type[Kind]] = RuleSet(
    name=NAME,
    kinds=all_kinds(),
    rules=Rules(
        hit=coordinator.longest_hit,
        admit=coordinator.admit,
        allocate=coordinator.allocate,
        register=coordinator.register,
        retire=coordinator.retire,
        free=coordinator.free,
        evict=coordinator.evict,
    ),
)
"""Rules that `reference.dialects.vllm.manager.Manager` follows unless it is given another record."""

"""The row of a plan of vLLM 0.33's in a capacity table."""

from __future__ import annotations

from hkv.contract.plan_command import Capacity
from hkv.dialects.vllm.planning.cache_plan import CachePlan
from hkv.dialects.vllm.planning.tables import kind_text


def capacity_of(plan: CachePlan) -> Capacity:
    """The row of a plan. Tokens and concurrency are those that vLLM logs at start-up."""
    held = plan.served.residency.full_length_blocks
    widest = max(range(len(held)), key=lambda index: held[index], default=None)
    return Capacity(
        max_model_len=plan.max_model_len,
        token_bytes=plan.token_bytes,
        sequence_bytes=plan.sequence_bytes,
        num_blocks=plan.num_blocks,
        tokens=plan.tokens,
        concurrency=plan.concurrency if plan.request_blocks else None,
        requests=plan.requests,
        limiting="" if widest is None else kind_text(plan.served.plan.groups[widest]),
        limiting_share=0.0 if widest is None else held[widest] / sum(held),
        limited_by=plan.limited_by,
        waste=plan.waste,
        weights=max((part.most for part in plan.settings.memory.parts.get("weights", ())), default=None),
        memory=min(plan.settings.memory.stages),
    )

"""The row of a plan of vLLM 0.33's in a capacity table."""

from __future__ import annotations

from typing import Any

from hkv.dialects.capacity import Capacity
from hkv.dialects.vllm.planning.served import ServedPlan
from hkv.dialects.vllm.planning.startup import startup
from hkv.dialects.vllm.planning.tables import kind_text


def capacity_of(report: dict[str, Any], served: ServedPlan) -> Capacity:
    """The row of a plan.

    Tokens and concurrency are those that vLLM logs at start-up.

    Args:
      report: everything that `hkv plan` knows of it.
      served: the plan.
    """
    plan, held = served.plan, served.residency.full_length_blocks
    said = startup(plan)
    widest = max(range(len(held)), key=lambda index: held[index], default=None)
    return Capacity(
        max_model_len=plan.max_model_len,
        token_bytes=report["model"]["token_bytes"],
        sequence_bytes=report["model"]["sequence_bytes"],
        num_blocks=plan.num_blocks,
        tokens=said.tokens,
        concurrency=said.concurrency if said.line else None,
        requests=served.residency.requests,
        limiting="" if widest is None else kind_text(plan.groups[widest]),
        limiting_share=0.0 if widest is None else held[widest] / sum(held),
        limited_by=served.limited_by,
        waste=_waste(report, held),
    )


def _waste(report: dict[str, Any], held: tuple[int, ...]) -> float:
    """Share of the bytes of a longest request's blocks in which no layer's bytes lie."""
    taken = sum(held) * report["bytes_per_block"]
    used = [group["bytes_per_block"] - group["padding_bytes"] for group in report["groups"]]
    return 1 - sum(count * size for count, size in zip(held, used, strict=True)) / taken if taken else 0.0

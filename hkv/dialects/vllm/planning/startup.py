"""The two numbers that vLLM 0.33 logs at start-up, to the digit, and how HKV's own count differs from them."""

from __future__ import annotations

import dataclasses

from hkv.dialects.vllm.planning.plan import Plan
from hkv.dialects.vllm.planning.residency import Residency


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

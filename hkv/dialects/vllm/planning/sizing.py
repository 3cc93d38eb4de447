"""Number of blocks that a request needs, and length of the longest request that fits into a memory."""

from __future__ import annotations

from collections.abc import Sequence

from hkv.dialects.vllm.planning.plan import PlannedGroup
from hkv.errors import PlanError
from hkv.spec import RequestLimits


def request_blocks(groups: Sequence[PlannedGroup], limits: RequestLimits) -> int:
    """Blocks reserved for one request of the longest length, all groups together.

    Each group draws its own blocks from the shared pool; the neediest layer of a mixed group decides (vLLM 0.33
    `_max_memory_usage_bytes_from_groups`). An empty group still takes blocks: its table exists on every stage.

    Args:
      groups: the groups.
      limits: longest request and tokens in flight.
    """
    return sum(max(spec.max_request_blocks(limits) for spec in group.specs or (group.spec,)) for group in groups)


def longest_request(groups: Sequence[PlannedGroup], limits: RequestLimits, blocks: int) -> int:
    """Tokens of the longest request, up to `limits.max_model_len`, that `blocks` blocks can hold; 0 if none can.

    Args:
      groups: the groups.
      limits: the length to search up to, and tokens in flight.
      blocks: blocks that requests may use.
    """
    low, high = 0, limits.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if request_blocks(groups, limits.with_max_model_len(middle)) <= blocks:
            low = middle
        else:
            high = middle - 1
    return low


def fit_length(
    workers: Sequence[Sequence[PlannedGroup]], blocks: Sequence[int], limits: RequestLimits
) -> RequestLimits:
    """The limits with the longest request that fits on every worker (vLLM 0.33 `_auto_fit_max_model_len`).

    Args:
      workers: each worker's groups.
      blocks: blocks that requests may use on each.
      limits: the length to search up to.

    Raises:
      PlanError: not even one token fits.
    """
    longest = min(longest_request(groups, limits, count) for groups, count in zip(workers, blocks, strict=True))
    if longest < 1:
        raise PlanError("memory", list(blocks), "blocks for a request of one token")
    return limits.with_max_model_len(longest)


def check_fits(groups: Sequence[PlannedGroup], usable: int, block: int, memory: int, limits: RequestLimits) -> None:
    """Raise PlanError unless one longest request fits beside the null block (vLLM `_check_enough_kv_cache_memory`).

    Args:
      groups: one worker's groups.
      usable: blocks that requests may use.
      block: bytes of a block.
      memory: bytes that the worker has.
      limits: longest request.
    """
    needed = request_blocks(groups, limits)
    if needed <= usable:
        return
    longest = longest_request(groups, limits, usable)
    hint = f"; requests of {longest} tokens would fit" if longest else ""
    expected = (
        f"at least {(needed + 1) * block} bytes: {needed} blocks of {block} bytes for a request of "
        f"{limits.max_model_len} tokens, and the null block{hint}"
    )
    raise PlanError("memory", memory, expected)

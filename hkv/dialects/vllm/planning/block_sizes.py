"""The two block sizes of the scheduler: to what lengths hits are aligned, and at what lengths prefixes are hashed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hkv.dialects.vllm.planning.options import PlanOptions
from hkv.dialects.vllm.planning.plan import PlannedGroup
from hkv.errors import PlanError
from hkv.spec import LayerSpec, is_cp_sharded


def resolve_block_sizes(groups: Sequence[PlannedGroup], options: PlanOptions) -> tuple[int, int]:
    """`(scheduler_block_size, hash_block_size)` in tokens (vLLM 0.33 `resolve_kv_cache_block_sizes`).

    Args:
      groups: the model's groups, at least one.
      options: context parallelism, Mamba mode, caching and the unit of prefix matching.

    Raises:
      PlanError: the unit does not divide the groups' blocks, or cuts through a compressed state.
    """
    ranks = options.limits.context_parallel
    sizes = [block_tokens(group.spec, ranks) for group in groups]
    if len(groups) == 1:
        if options.caching and options.prefix_match_unit not in (None, sizes[0]):
            expected = f"{sizes[0]}, the block of the only group"
            raise PlanError("prefix_match_unit", options.prefix_match_unit, expected)
        return sizes[0], sizes[0]
    scheduler = math.lcm(*sizes)
    specs = [spec for group in groups for spec in group.specs or (group.spec,)]
    if not options.caching or (options.limits.mamba_mode != "align" and any(s.snapshot for s in specs)):
        return scheduler, scheduler
    hashed = [size for size, group in zip(sizes, groups, strict=True) if group.prefix_cacheable] or sizes
    unit = options.prefix_match_unit or math.gcd(*hashed)
    if any(size % unit for size in hashed):
        raise PlanError("prefix_match_unit", unit, f"a divisor of the groups' blocks {hashed}")
    _check_compression(specs, unit if has_partial_hits(specs, unit, ranks) else scheduler)
    return scheduler, unit


def block_tokens(spec: LayerSpec, context_parallel: int) -> int:
    """Tokens in one manager block: the spec's, times the ranks that share it."""
    return spec.block_size * (context_parallel if is_cp_sharded(spec) else 1)


def has_partial_hits(specs: Sequence[LayerSpec], unit: int, context_parallel: int) -> bool:
    """True if states inside a block may be hit (vLLM 0.33 `partial_hash_hits_enabled`, Mamba mode `align`)."""
    return any(
        spec.snapshot and (spec.block_size > unit or (context_parallel > 1 and spec.block_size == unit))
        for spec in specs
    )


def _check_compression(specs: Sequence[LayerSpec], alignment: int) -> None:
    for spec in specs:
        tokens = getattr(spec, "tokens_per_state", 1)
        if spec.prefix_cacheable and isinstance(tokens, int) and tokens > 1 and alignment % tokens:
            expected = f"hits at multiples of {tokens} tokens, which share a state; they are {alignment} tokens apart"
            raise PlanError("prefix_match_unit", alignment, expected)

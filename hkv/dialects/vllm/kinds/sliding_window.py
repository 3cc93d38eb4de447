"""Sliding-window attention under vLLM 0.33 (`SlidingWindowManager`): the last run of blocks that fills the window."""

from __future__ import annotations

from typing import Any

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.rules.reads import UNLIMITED
from hkv.spec import SlidingWindow


def parameters(config: VllmConfig, group: int, spec: SlidingWindow, eagle: bool) -> dict[str, Any]:
    """The window's reach, the blocks it needs, and the most that admission counts."""
    kept = spec.window - 1 + spec.extra_retained_tokens
    in_flight = min(kept + config.in_flight_limit, config.max_model_len)
    need = -(-(spec.window - 1) // config.block_size(group))
    keep = need + eagle
    free = spec.window == 1 and "window-one-never-hits" not in config.bugs
    return {
        "REACH": kept,
        "NEED": -1 if free else need,
        "PERIOD": _period(config, group, keep),
        "KEEP": keep,
        "SHIFT": eagle,
        "CAP": -(-in_flight // spec.block_size) + 1,
    }


def _period(config: VllmConfig, group: int, keep: int) -> int:
    """Blocks between two lengths before which the last `keep` are kept; 0 if that is all of them."""
    block, interval = config.block_size(group), config.retention_interval
    if config.hit_alignment % block:
        return 0
    if interval == 0:
        return UNLIMITED
    period = (interval or config.hit_alignment) // block
    return 0 if keep >= period else period

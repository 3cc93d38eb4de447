"""Recurrent states under vLLM 0.33 (`MambaManager`, `align`): the last snapshot, at the columns of a row."""

from __future__ import annotations

from typing import Any

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.rules.export import BEGUN_LOOKED_AT, BEYOND_KEYS, LOOKED_AT, STAYS_PLANNED
from hkv.dialects.vllm.rules.reads import UNLIMITED
from hkv.spec import Mamba

_DEFECTS = (
    (BEYOND_KEYS, "checkpoint-beyond-keys"),
    (STAYS_PLANNED, "plan-outlives-refusal"),
    (LOOKED_AT, "checkpoint-under-later-key"),
    (BEGUN_LOOKED_AT, "begun-state-under-later-key"),
)


def parameters(config: VllmConfig, group: int, spec: Mamba, eagle: bool) -> dict[str, Any]:
    """States that are kept, each for one length; number of scratch states; states that a chunk exports."""
    del eagle
    cached = config.caching and spec.prefix_cacheable
    coarse = config.block_size(group) != config.hash_block_size
    return {
        "REACH": 1,
        "NEED": 1,
        "TAIL": 2 * cached,
        "FINE": cached and coarse and config.partial_hits,
        "PERIOD": _period(config.retention_interval, spec.block_size),
        "KEEP": 1,
        "SCRATCH": spec.num_speculative_blocks,
        "EXPORT_UNIT": config.hit_alignment,
        "EXPORT_STEP": (spec.prefill_checkpoint_alignment or 0) if spec.num_prefill_checkpoint_blocks else 0,
        "EXPORT_LAST": config.retention_interval == 0,
        "EXPORT_FAILS": sum(bit for bit, name in _DEFECTS if name in config.bugs),
    }


def _period(interval: int | None, block: int) -> int:
    """Blocks between two states that are kept; 0 if all of them are."""
    if interval is None:
        return 0
    period = interval // block if interval else UNLIMITED
    return 0 if period == 1 else period

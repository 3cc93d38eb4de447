"""Recurrent states under vLLM 0.33 (`MambaManager`, `align`): the last snapshot, at the columns of a row."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.rules.finders import Query, Search
from hkv.dialects.vllm.rules.parameters import UNLIMITED
from hkv.spec import Mamba
from hkv.state.loops import Scalar

NUMBER = 3
PLAIN = 5
"""Number of the kind in `none` mode: one running state, rows as of any other kind."""

LOOKED_UP_ONCE = False


def parameters(config: VllmConfig, group: int, eagle: bool) -> dict[str, Any]:
    """Which states are kept, each for one length; how many are scratch; which a chunk leaves behind for others."""
    del eagle
    spec = config.topology.specs[group]
    assert isinstance(spec, Mamba)
    cached = config.caching and spec.prefix_cacheable
    coarse = config.block_size(group) != config.hash_block_size
    return {
        "TAIL": 2 * cached,
        "FINE": cached and coarse and config.partial_hits,
        "PERIOD": _period(config.retention_interval, spec.block_size),
        "KEEP": 1,
        "SCRATCH": spec.num_speculative_blocks,
        "EXPORT_UNIT": config.hit_alignment,
        "EXPORT_STEP": (spec.prefill_checkpoint_alignment or 0) if spec.num_prefill_checkpoint_blocks else 0,
        "EXPORT_LAST": config.retention_interval == 0,
        "EXPORT_FAILS": ("checkpoint-beyond-keys" in config.bugs) + 2 * ("plan-outlives-refusal" in config.bugs),
    }


def _period(interval: int | None, block: int) -> int:
    """Blocks between two states that are kept; 0 if all of them are."""
    if interval is None:
        return 0
    period = interval // block if interval else UNLIMITED
    return 0 if period == 1 else period


def skipped_tokens(n: Scalar, reach: Scalar) -> Scalar:
    """Tokens that the query at `n` does not need: all but the last, whose state it continues."""
    del reach
    return jnp.maximum(n - 1, 0)


def last_query(end: Scalar, reach: Scalar) -> Scalar:
    """The last query that still needs all tokens from `end - 1` on: `skipped_tokens` is below `end` up to it."""
    del reach
    return end


def search(query: Query) -> Search:
    """The last snapshot; a hit drops none."""
    one = jnp.ones_like(query.need)
    return Search(backward=jnp.bool_(True), start=one * 0, need=one, drop=jnp.bool_(False))


def number(spec: Mamba) -> int:
    """The kind's number in parameters, which depends on the mode."""
    return NUMBER if spec.cache_mode == "align" else PLAIN

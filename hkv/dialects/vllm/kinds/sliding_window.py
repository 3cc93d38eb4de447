"""Sliding-window attention under vLLM 0.33 (`SlidingWindowManager`): the last run of blocks that fills the window."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.rules.finders import Query, Search
from hkv.dialects.vllm.rules.parameters import UNLIMITED
from hkv.spec import SlidingWindow
from hkv.state.loops import Scalar

NUMBER = 1
LOOKED_UP_ONCE = False


def parameters(config: VllmConfig, group: int, eagle: bool) -> dict[str, Any]:
    """The window's reach, the blocks it needs, and the most that admission counts."""
    spec = config.topology.specs[group]
    assert isinstance(spec, SlidingWindow)
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


def skipped_tokens(n: Scalar, reach: Scalar) -> Scalar:
    """Tokens that the query at `n` does not need: those before its window."""
    return jnp.maximum(n - reach, 0)


def last_query(end: Scalar, reach: Scalar) -> Scalar:
    """The last query that still needs all tokens from `end - 1` on: `skipped_tokens` is below `end` up to it."""
    return end + reach - 1


def search(query: Query) -> Search:
    """The last run that fills the window, one block longer if a hit drops a block."""
    anywhere = (query.need < 0) & ~query.drop
    need = jnp.where(anywhere, 0, jnp.maximum(jnp.maximum(query.need, 0) + query.drop, 1))
    return Search(backward=jnp.bool_(True), start=jnp.zeros_like(need), need=need, drop=query.drop)

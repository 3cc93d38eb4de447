"""Opaque regions under vLLM 0.33 (`CircularBufferManager`): one block a request, for the whole of its life."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from hkv.dialects.vllm.config import VllmConfig
from hkv.state.loops import Scalar

NUMBER = 4
LOOKED_UP_ONCE = False


def parameters(config: VllmConfig, group: int, eagle: bool) -> dict[str, Any]:
    """Nothing: one block whatever the configuration."""
    del config, group, eagle
    return {}


def skipped_tokens(n: Scalar, reach: Scalar) -> Scalar:
    """Tokens that the query at `n` does not need: the ring gives none back."""
    del reach
    return jnp.zeros_like(n)


def last_query(end: Scalar, reach: Scalar) -> Scalar:
    """The last query that still needs all tokens from `end - 1` on: `skipped_tokens` is below `end` up to it."""
    del reach
    return jnp.full_like(end, (1 << 30) - 1)

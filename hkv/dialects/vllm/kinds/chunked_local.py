"""Chunked local attention under vLLM 0.33 (`ChunkedLocalAttentionManager`): only the current chunk is looked up."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.rules.finders import Query, Search
from hkv.errors import ConfigError
from hkv.spec import ChunkedLocal
from hkv.state.loops import Scalar, ceil_divide, divide, remainder

NUMBER = 2
LOOKED_UP_ONCE = False


def parameters(config: VllmConfig, group: int, eagle: bool) -> dict[str, Any]:
    """The chunk, and the most that admission counts.

    Raises:
      ConfigError: hits that end where the kind cannot resume.
    """
    if eagle:
        raise ConfigError(f"groups[{group}].eagle", True, "no EAGLE drop for chunked_local")
    alone = len(config.topology.specs) == 1
    if config.caching and not alone and config.block_size(group) != config.hit_alignment:
        expected = f"the {config.hit_alignment} tokens to which hits are aligned"
        raise ConfigError(f"groups[{group}].block_size", config.block_size(group), expected)
    spec = config.topology.specs[group]
    assert isinstance(spec, ChunkedLocal)
    in_flight = min(spec.chunk + config.in_flight_limit, config.max_model_len)
    return {"REACH": spec.chunk, "CAP": -(-in_flight // spec.block_size)}


def skipped_tokens(n: Scalar, reach: Scalar) -> Scalar:
    """Tokens that the query at `n` does not need: those of earlier chunks."""
    n = jnp.maximum(n, 0)
    return n - remainder(n, jnp.maximum(reach, 1))


def last_query(end: Scalar, reach: Scalar) -> Scalar:
    """The last query that still needs all tokens from `end - 1` on: `skipped_tokens` is below `end` up to it."""
    chunk = jnp.maximum(reach, 1)
    return ceil_divide(end, chunk) * chunk - 1


def search(query: Query) -> Search:
    """From the start of the current chunk on; earlier chunks count as hit without a look."""
    start = divide(skipped_tokens(query.length, query.reach), query.block)
    return Search(jnp.bool_(False), start=start, need=jnp.zeros_like(start), drop=jnp.bool_(False))

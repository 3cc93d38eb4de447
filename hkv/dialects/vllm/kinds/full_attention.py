"""Full attention under vLLM 0.33 (`FullAttentionManager`): every block counts, from the first on."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.rules.finders import Query, Search
from hkv.state.loops import Scalar

NUMBER = 0
LOOKED_UP_ONCE = True


def parameters(config: VllmConfig, group: int, eagle: bool) -> dict[str, Any]:
    """Where a manager block holds several hash blocks, the prompt's tail is registered, and hits may end inside.

    Such a hit waits for the next step if its block is not written so far (`hkv.bugs`: copied-before-written).
    """
    del eagle
    coarse = config.caching and config.block_size(group) != config.hash_block_size
    fine = coarse and config.partial_hits
    return {"TAIL": coarse, "FINE": fine, "WAITS": fine and "copied-before-written" not in config.bugs}


def skipped_tokens(n: Scalar, reach: Scalar) -> Scalar:
    """Tokens that the query at `n` does not need: none."""
    del reach
    return jnp.zeros_like(n)


def last_query(end: Scalar, reach: Scalar) -> Scalar:
    """The last query that still needs all tokens from `end - 1` on: `skipped_tokens` is below `end` up to it."""
    del reach
    return jnp.full_like(end, (1 << 30) - 1)


def search(query: Query) -> Search:
    """From the first block on."""
    zero = jnp.zeros_like(query.need)
    return Search(backward=jnp.bool_(False), start=zero, need=zero, drop=query.drop)

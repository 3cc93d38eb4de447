"""Chunked local attention under vLLM 0.33 (`ChunkedLocalAttentionManager`): only the current chunk is looked up."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from hkv.dialects.vllm import probe
from hkv.dialects.vllm.config import VllmConfig
from hkv.errors import ConfigError
from hkv.spec import ChunkedLocal
from hkv.state.loops import Scalar, divide, loop, remainder
from hkv.state.workspace import Workspace

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
    if config.caching and not alone and config.block_size(group) != config.scheduler_block_size:
        expected = f"the {config.scheduler_block_size} tokens to which hits are aligned"
        raise ConfigError(f"groups[{group}].block_size", config.block_size(group), expected)
    spec = config.topology.specs[group]
    assert isinstance(spec, ChunkedLocal)
    in_flight = min(spec.chunk + config.in_flight_limit, config.max_model_len)
    return {"REACH": spec.chunk, "CAP": -(-in_flight // spec.block_size)}


def skipped_tokens(n: Scalar, reach: Scalar) -> Scalar:
    """Tokens that the query at `n` does not need: those of earlier chunks."""
    n = jnp.maximum(n, 0)
    return n - remainder(n, jnp.maximum(reach, 1))


def find(work: Workspace, view: Any, query: probe.Query, enabled: Scalar) -> tuple[Workspace, Scalar, Scalar]:
    """The blocks of the current chunk, from its start on; those of earlier chunks count as hit without a look.

    Returns:
      The workspace, the hit in tokens, and the first entry of the row that is not null.
    """
    start = divide(skipped_tokens(query.length, query.reach), query.block)
    start = jnp.minimum(start, query.limit)

    def body(w: Workspace, local: tuple[Scalar, Scalar]) -> tuple[Workspace, tuple[Scalar, Scalar]]:
        i, _ = local
        w, found = probe.cached(w, view, query, i)
        return w, (i + found, found)

    limit = jnp.where(enabled, query.limit, 0)
    work, (length, _) = loop(
        lambda c: (c[0] < limit) & c[1], body, work, (start, True), reads=probe.READS, writes=probe.WRITES
    )
    return work, length * query.block, start

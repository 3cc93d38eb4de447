"""Full attention under vLLM 0.33 (`FullAttentionManager`): every block counts, from the first on."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from hkv.dialects.vllm import probe
from hkv.dialects.vllm.config import VllmConfig
from hkv.state.loops import Scalar, loop
from hkv.state.workspace import Workspace

NUMBER = 0
LOOKED_UP_ONCE = True


def parameters(config: VllmConfig, group: int, eagle: bool) -> dict[str, Any]:
    """The prompt's tail is registered where a manager block holds several hash blocks."""
    del eagle
    return {"TAIL": config.caching and config.block_size(group) != config.hash_block_size}


def skipped_tokens(n: Scalar, reach: Scalar) -> Scalar:
    """Tokens that the query at `n` does not need: none."""
    del reach
    return jnp.zeros_like(n)


def find(work: Workspace, view: Any, query: probe.Query, enabled: Scalar) -> tuple[Workspace, Scalar, Scalar]:
    """The longest run of cached blocks from the first on.

    Returns:
      The workspace, the hit in tokens, and the first entry of the row that is not null.
    """

    def body(w: Workspace, local: tuple[Scalar, Scalar]) -> tuple[Workspace, tuple[Scalar, Scalar]]:
        i, _ = local
        w, found = probe.cached(w, view, query, i)
        return w, (i + found, found)

    limit = jnp.where(enabled, query.limit, 0)
    work, (length, _) = loop(
        lambda c: (c[0] < limit) & c[1], body, work, (0, True), reads=probe.READS, writes=probe.WRITES
    )
    dropped = length - (query.drop & (length > 0))
    kept = dropped - dropped % query.steps
    return work, kept * query.block, np.int32(0) * kept

"""Recurrent states under vLLM 0.33 (`MambaManager`, `align`): the last snapshot, at the columns of a row."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from hkv.dialects.vllm import probe
from hkv.dialects.vllm.config import VllmConfig
from hkv.errors import ConfigError
from hkv.spec import Mamba
from hkv.state.loops import Scalar, loop, remainder
from hkv.state.workspace import Workspace

NUMBER = 3
PLAIN = 5
"""Number of the kind in `none` mode: one running state, rows as of any other kind."""

LOOKED_UP_ONCE = False


def parameters(config: VllmConfig, group: int, eagle: bool) -> dict[str, Any]:
    """Nothing beyond the block; states for drafts and states inside a chunk are refused.

    Raises:
      ConfigError: the group has speculative or checkpoint blocks.
    """
    del eagle
    spec = config.topology.specs[group]
    assert isinstance(spec, Mamba)
    for name in ("num_speculative_blocks", "num_prefill_checkpoint_blocks"):
        if getattr(spec, name):
            expected = "0: the compiled cache has no speculative or checkpoint states yet"
            raise ConfigError(f"groups[{group}].{name}", getattr(spec, name), expected)
    return {}


def skipped_tokens(n: Scalar, reach: Scalar) -> Scalar:
    """Tokens that the query at `n` does not need: all but the last, whose state it continues."""
    del reach
    return jnp.maximum(n - 1, 0)


def find(work: Workspace, view: Any, query: probe.Query, enabled: Scalar) -> tuple[Workspace, Scalar, Scalar]:
    """The last snapshot that stands where a hit may end.

    Returns:
      The workspace, the hit in tokens, and the first entry of the row that is not null.
    """

    def body(w: Workspace, local: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
        i, _ = local
        w, found = probe.cached(w, view, query, i)
        return w, (i - jnp.where(found, 0, query.steps), found)

    limit = jnp.where(enabled, query.limit, 0)
    last = limit - remainder(limit, query.steps) - 1
    work, (i, found) = loop(
        lambda c: (c[0] >= 0) & ~c[1], body, work, (last, False), reads=probe.READS, writes=probe.WRITES
    )
    return work, jnp.where(found, (i + 1) * query.block, 0), jnp.where(found, i, 0)


def number(spec: Mamba) -> int:
    """The kind's number in parameters, which depends on the mode."""
    return NUMBER if spec.cache_mode == "align" else PLAIN

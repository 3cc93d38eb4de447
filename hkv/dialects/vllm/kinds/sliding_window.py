"""Sliding-window attention under vLLM 0.33 (`SlidingWindowManager`): the last run of blocks that fills the window."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from hkv.dialects.vllm import probe
from hkv.dialects.vllm.config import VllmConfig
from hkv.spec import SlidingWindow
from hkv.state.loops import Scalar, loop, remainder
from hkv.state.workspace import Workspace

NUMBER = 1
LOOKED_UP_ONCE = False


def parameters(config: VllmConfig, group: int, eagle: bool) -> dict[str, Any]:
    """The window's reach, the blocks it needs, and the most that admission counts."""
    spec = config.topology.specs[group]
    assert isinstance(spec, SlidingWindow)
    kept = spec.window - 1 + spec.extra_retained_tokens
    in_flight = min(kept + config.in_flight_limit, config.max_model_len)
    need = -(-(spec.window - 1) // config.block_size(group))
    period = config.scheduler_block_size // config.block_size(group)
    keep = need + eagle
    free = spec.window == 1 and "window-one-never-hits" not in config.bugs
    return {
        "REACH": kept,
        "NEED": -1 if free else need,
        "PERIOD": 0 if keep >= period else period,
        "KEEP": keep,
        "CAP": -(-in_flight // spec.block_size) + 1,
    }


def skipped_tokens(n: Scalar, reach: Scalar) -> Scalar:
    """Tokens that the query at `n` does not need: those before its window."""
    return jnp.maximum(n - reach, 0)


def find(work: Workspace, view: Any, query: probe.Query, enabled: Scalar) -> tuple[Workspace, Scalar, Scalar]:
    """The last run of blocks that fills the window and ends where a hit may end, or a run from the first block on.

    Returns:
      The workspace, the hit in tokens, and the first entry of the row that is not null.
    """
    anywhere = (query.need < 0) & ~query.drop
    need = jnp.maximum(query.need, 0) + query.drop

    def body(w: Workspace, local: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
        i, run, _, phase = local
        w, found = probe.cached(w, view, query, i)
        starts = (run > 0) | (phase == 0)
        run = jnp.where(found & starts, run + 1, 0)
        phase = jnp.where(phase == 0, query.steps - 1, phase - 1)
        return w, (i - 1, run, (run > 0) & (run >= need), phase)

    last = jnp.where(enabled & ~anywhere, query.limit, 0) - 1
    phase = remainder(jnp.maximum(last + 1 - query.drop, 0), query.steps)
    work, (i, run, filled, _) = loop(
        lambda c: (c[0] >= 0) & ~c[2], body, work, (last, 0, False, phase), reads=probe.READS, writes=probe.WRITES
    )
    first = jnp.where(filled, i + 1, 0)
    length = jnp.where(anywhere, query.limit, first + run)
    first = jnp.where(anywhere, length, first)
    length -= jnp.where(filled, 0, length % query.steps)
    length -= query.drop & (length > 0)
    length -= jnp.where(query.drop, length % query.steps, 0)
    return work, length * query.block, jnp.minimum(first, length)

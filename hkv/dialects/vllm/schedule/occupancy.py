"""Blocks of each group in a cache under vLLM 0.33's rules, counted in the state of any engine."""

from __future__ import annotations

import numpy as np

from hkv.dialects.vllm.log.structs import CacheState
from hkv.replay.occupancy import Kind


def of_answer(state: CacheState, groups: int) -> np.ndarray:
    """Blocks by `Kind` and group, int64[3, groups], in what an engine says of its state."""
    found = np.zeros((len(Kind), groups), np.int64)
    held = {int(block) for block in state.refs}
    for group in range(groups):
        found[Kind.HELD, group] = len(held.intersection(block for rows in state.rows.values() for block in rows[group]))
    for block, (group, _, _) in state.cached.items():
        found[Kind.CACHED, group] += 1
        found[Kind.EVICTABLE, group] += int(block) not in held
    return found

"""Blocks of each group, counted in the arrays of the compiled cache; host-only schedules do not need JAX for theirs."""

from __future__ import annotations

import numpy as np

from hkv.dialects.vllm.rules.parameters import GroupField
from hkv.dialects.vllm.rules.transitions import RUNNING
from hkv.replay.occupancy import Kind
from hkv.state.state import GROUP_WORDS, REQUEST_WORDS, Request, Row, State


def of_arrays(state: State, table: np.ndarray, groups: int) -> np.ndarray:
    """Blocks by `Kind` and group, int64[3, groups], in the arrays of a compiled cache between two steps."""
    sinks, members = table[:, GroupField.SINKS] > 0, table[:, GroupField.MEMBER]
    pool = slice(1, state.blocks.shape[0] - 1)
    references, keys = state.blocks[pool], state.keys[pool, : 1 + state.buckets.parts]
    group_of = np.full(state.blocks.shape[0], groups)
    for slot in np.flatnonzero(state.requests[:, Request.LIVE] == RUNNING):
        for group in range(groups):
            base = REQUEST_WORDS + GROUP_WORDS * group
            length, first = (int(state.requests[slot, base + field]) for field in (Row.LENGTH, Row.FIRST))
            group_of[state.rows[slot, group, 0 if sinks[group] else first : length]] = group
    group_of = group_of[pool]
    entries = (keys[:, 0] >> 2) - 1
    for part in range(1, keys.shape[1]):
        entries = np.where(entries < 0, keys[:, part] - 1, entries)
    cached = entries >= 0
    group_of[cached] = members[entries[cached] % state.table.shape[1]]
    held = references < 0
    chosen = {Kind.HELD: held, Kind.CACHED: cached, Kind.EVICTABLE: cached & ~held}
    return np.stack([np.bincount(group_of[chosen[kind]], minlength=groups + 1)[:groups] for kind in Kind])

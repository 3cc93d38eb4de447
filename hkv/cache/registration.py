"""Registration of the blocks that a step fills, under the keys of the tokens up to their ends."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hkv.cache.blocks import read_once
from hkv.cache.queries import Rows, block_sizes, field, spread
from hkv.cache.spans import clip, cut, running_sum
from hkv.cache.state import StepCounter, StepState, replace
from hkv.dialects.vllm.rules.parameters import CacheField, GroupField, Parameters


def cacheable(parameters: Parameters, groups: jax.Array, tokens: jax.Array) -> jax.Array:
    """Tokens of each group that may be registered, int32[Q, G]: `hkv.dialects.vllm.rules.register.cacheable_tokens`."""
    cache = parameters.cache
    tokens = spread(groups, tokens)
    certain = jnp.maximum(tokens - cache[CacheField.REPREFILLABLE], 0)
    alignment = jnp.maximum(cache[CacheField.ALIGNMENT], 1)
    aligned = tokens - tokens % alignment
    more = jnp.minimum(certain, certain - certain % alignment + block_sizes(groups))
    hybrid = jnp.where((field(groups, GroupField.EAGLE) != 0) & (aligned > 0), more, aligned)
    found = jnp.where(cache[CacheField.UNITARY] != 0, certain, hybrid)
    return jnp.where((field(groups, GroupField.CACHEABLE) != 0) & (cache[CacheField.CACHING] != 0), found, 0)


def register(
    parameters: Parameters,
    state: StepState,
    lines: jax.Array,
    rows: Rows,
    tokens: jax.Array,
    served: jax.Array,
    room: int,
) -> tuple[StepState, jax.Array, jax.Array]:
    """Registers the blocks that served rows' first `tokens` tokens fill, but null ones and those retention leaves out.

    Args:
      parameters: the configuration.
      state: the cache.
      lines: int32[Q], the row of each line.
      rows: their fields.
      tokens: int32[Q].
      served: bool[Q].
      room: lanes; what does not fit waits.

    Returns:
      The state; entries looked at, int32[Q, G]; and how many wait, int32[].
    """
    groups = parameters.groups[: state.rows.shape[1]]
    full = cacheable(parameters, groups, tokens) // block_sizes(groups)
    due = jnp.where(served[:, None], jnp.maximum(full - rows.cached, 0), 0)
    counts = clip(due, room)
    spans = cut(counts, room)
    line, group = spans.line, spans.group
    row = lines[line]
    column = rows.cached[line, group] + spans.within
    block = state.rows[row, group, column]
    scale = jnp.maximum(groups[group, GroupField.SCALE], 1)
    key = state.chains[row, (column + 1) * scale - 1]
    period, shift = groups[group, GroupField.PERIOD], groups[group, GroupField.SHIFT]
    phase = jnp.maximum(column - shift, 0) % jnp.maximum(period, 1)
    kept = (period == 0) | ((column >= shift) & (phase >= period - groups[group, GroupField.KEEP]))
    kept &= spans.live & (block != 0)
    refs = read_once(spans.ends[-1] > 0, lambda: state.refs[block])
    kept &= (refs & 1) == 0
    order = running_sum(kept)
    stamp = (state.counters[StepCounter.REGISTERED] + order - 1).astype(jnp.uint32)
    words = jnp.concatenate([key, group.astype(jnp.uint32)[:, None], stamp[:, None]], axis=1)
    place = jnp.where(kept, block, state.refs.shape[0])
    keys = state.keys.at[place].set(words, mode="drop")
    counters = state.counters.at[StepCounter.REGISTERED].add(order[-1])
    state = replace(state, refs=state.refs.at[place].set(refs | 1, mode="drop"), keys=keys, counters=counters)
    return state, rows.cached + counts, jnp.sum(due - counts, dtype=jnp.int32)

"""Registration of the blocks that a step fills, under the keys of the tokens up to their ends."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hkv.cache.blocks import read_once
from hkv.cache.queries import EveryGroup, Rows, block_sizes, field, spread
from hkv.cache.spans import Spans, cut, running_sum
from hkv.cache.state import StepCounter, StepState, replace
from hkv.dialects.vllm.rules import retention
from hkv.dialects.vllm.rules.hit import resumable
from hkv.dialects.vllm.rules.parameters import CacheField, GroupField, Parameters
from hkv.dialects.vllm.rules.register import cacheable_tokens, reusable
from hkv.state.loops import divide, remainder


def _retained(view: EveryGroup, rows: Rows, cacheable: jax.Array) -> jax.Array:
    """Ends of the entries that sparse retention keeps for lengths that are expected, int32[Q, G, 5]; 0 for none.

    The last one is a recurrent state's, kept if just as many tokens are computed as a repeated prompt could resume
    from (vLLM 0.33 `MambaManager._cache_partial_tail_block`).
    """
    prompt, shared = (spread(view.groups, tokens) for tokens in (rows.prompt, rows.shared_prefix))
    resumed = cacheable == resumable(view, prompt, view.whole(CacheField.HASH_BLOCK))
    whole = divide(cacheable, block_sizes(view.groups))
    tail = jnp.where(resumed & (view.group(None, GroupField.TAIL) == 2), whole, 0)
    ends = jnp.stack([*retention.expected_ends(view, None, prompt, shared), tail], axis=2)
    return jnp.where(view.cache[CacheField.RETAINED] != 0, ends, 0)


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
    view = EveryGroup(parameters.cache, groups, tokens.shape[0])
    cached = (field(groups, GroupField.CACHEABLE) != 0) & (parameters.cache[CacheField.CACHING] != 0)
    cacheable = jnp.where(cached, cacheable_tokens(view, None, spread(groups, tokens)), 0)
    full = divide(cacheable, block_sizes(groups))
    due = jnp.where(served[:, None], jnp.maximum(full - rows.cached, 0), 0)
    tails = jnp.any(groups[:, GroupField.TAIL] == 1)
    units = read_once(tails, lambda: _tail(view, rows, tokens, cacheable, full))
    tail = jnp.where(served[:, None] & (units > 0), 1, 0)
    spans = cut(due + tail, room)
    counts, line, group = spans.counts, spans.line, spans.group
    row = lines[line]
    scale = jnp.maximum(groups[group, GroupField.SCALE], 1)
    inside = spans.within >= due[line, group]
    column = rows.cached[line, group] + spans.within
    unit = jnp.where(inside, units[line, group], (column + 1) * scale)
    column = jnp.where(inside, divide(unit, scale), column)
    block = state.rows[row, group, column]
    key = state.chains[row, unit - 1]
    sparse = jnp.any(groups[:, GroupField.PERIOD] != 0)
    left_out = read_once(sparse, lambda: _left_out(view, rows, cacheable, spans, column))
    kept = spans.live & (block != 0) & ~left_out
    refs = read_once(spans.ends[-1] > 0, lambda: state.refs[block])
    # A block that was registered with the prompt's tail is registered anew when it is full.
    kept &= ((refs & 1) == 0) | ((groups[group, GroupField.TAIL] == 1) & ~inside)
    order = running_sum(kept)
    stamp = (state.counters[StepCounter.REGISTERED] + order - 1).astype(jnp.uint32)
    words = jnp.concatenate([key, group.astype(jnp.uint32)[:, None], stamp[:, None]], axis=1)
    place = jnp.where(kept, block, state.refs.shape[0])
    keys = state.keys.at[place].set(words, mode="drop")
    counters = state.counters.at[StepCounter.REGISTERED].add(order[-1])
    places = state.log.shape[0]
    noted = jnp.where(kept, stamp.astype(jnp.int32) & (places - 1), places)
    log = state.log.at[noted].set(block, mode="drop")
    refs = state.refs.at[place].set(refs | 1, mode="drop")
    state = replace(state, refs=refs, keys=keys, log=log, counters=counters)
    return state, rows.cached + jnp.minimum(counts, due), jnp.sum(due + tail - counts, dtype=jnp.int32)


def _left_out(view: EveryGroup, rows: Rows, cacheable: jax.Array, spans: Spans, column: jax.Array) -> jax.Array:
    """Mask bool[room] of lanes whose entries int32[room] sparse retention does not keep."""
    line, group = spans.line, spans.group
    period, shift = view.groups[group, GroupField.PERIOD], view.groups[group, GroupField.SHIFT]
    phase = remainder(jnp.maximum(column - shift, 0), jnp.maximum(period, 1))
    keep, end = view.groups[group, GroupField.KEEP], _retained(view, rows, cacheable)[line, group]
    kept = (period == 0) | ((column >= shift) & (phase >= period - keep))
    kept |= jnp.any((column[:, None] >= end - keep[:, None]) & (column[:, None] < end), axis=1)
    return ~kept


def _tail(view: EveryGroup, rows: Rows, tokens: jax.Array, cacheable: jax.Array, full: jax.Array) -> jax.Array:
    """Hash blocks up to the prompt's tail, where that is due in a block which is not full, int32[Q, G]; else 0.

    `hkv.dialects.vllm.rules.register`, where blocks of full attention hold several hash blocks. There a block that is
    full has the tail's key besides: nobody looks for that one, since hits end with blocks.
    """
    prompt, tokens = (spread(view.groups, counts) for counts in (rows.prompt, tokens))
    hash_block = jnp.maximum(view.whole(CacheField.HASH_BLOCK), 1)
    units = reusable(view, None, prompt, divide(tokens, hash_block))
    scale = jnp.maximum(view.group(None, GroupField.SCALE), 1)
    column = divide(units, scale)
    inside = (remainder(units, scale) != 0) & (column >= full) & (column < rows.length)
    due = (view.group(None, GroupField.TAIL) == 1) & inside & (units * hash_block <= cacheable)
    return jnp.where(due, units, 0)

"""Registration of the blocks that a step fills, under the keys of the tokens up to their ends."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hkv.cache import exports, tails
from hkv.cache.copies import numbered
from hkv.cache.entries import several
from hkv.cache.queries import EveryGroup, Rows, block_sizes, field, spread
from hkv.cache.spans import DROP, Spans, cut, once, running_sum
from hkv.cache.state import StepCounter, StepState, counted, replace
from hkv.cache.token_hashing import keyed, lookahead
from hkv.dialects.vllm.rules import retention
from hkv.dialects.vllm.rules.hit import resumable
from hkv.dialects.vllm.rules.parameters import CacheField, GroupField, Parameters
from hkv.dialects.vllm.rules.reads import UNLIMITED
from hkv.dialects.vllm.rules.register import cacheable_tokens, reusable
from hkv.state.loops import divide, remainder


def _retained(view: EveryGroup, rows: Rows, cacheable: jax.Array, left: exports.Exports | None) -> jax.Array:
    """Ends of the entries that sparse retention keeps for lengths that are expected, int32[Q, G, 5]; 0 for none.

    The last one is a recurrent state's, kept if just as many tokens are computed as a repeated prompt could resume
    from (vLLM 0.33 `MambaManager._cache_partial_tail_block`).
    """
    prompt, shared = (spread(view.groups, tokens) for tokens in (rows.prompt, rows.shared_prefix))
    resumed = cacheable == resumable(view, prompt, view.whole(CacheField.HASH_BLOCK))
    whole = divide(cacheable, block_sizes(view.groups))
    if left is not None:
        resumed &= left.tokens == 0
    if rows.partial is not None:
        resumed &= remainder(cacheable, jnp.broadcast_to(block_sizes(view.groups), cacheable.shape)) == 0
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
    turn: tails.Turn | None = None,
    left: exports.Exports | None = None,
) -> tuple[StepState, Rows, jax.Array]:
    """Registers the blocks that served rows' first `tokens` tokens fill, but null ones and those retention leaves out.

    Args:
      parameters: the configuration.
      state: the cache.
      lines: int32[Q], the row of each line.
      rows: their fields.
      tokens: int32[Q].
      served: bool[Q].
      room: lanes; what does not fit waits.
      turn: facts of the step, where hits may end inside blocks.
      left: states that chunks leave behind inside them, where they may.

    Returns:
      The state; the rows' fields, with the entries looked at; and how many wait, int32[].
    """
    groups = parameters.groups[: state.rows.shape[1]]
    view = EveryGroup(parameters.cache, groups, tokens.shape[0])
    cached = (field(groups, GroupField.CACHEABLE) != 0) & (parameters.cache[CacheField.CACHING] != 0)
    cacheable = jnp.where(cached, cacheable_tokens(view, None, spread(groups, tokens)), 0)
    full = divide(cacheable, block_sizes(groups))
    known = reached = None
    if lookahead(state):
        hash_block = jnp.maximum(parameters.cache[CacheField.HASH_BLOCK], 1)
        known, reached = (
            spread(groups, keyed(state, ends, hash_block)) for ends in (tokens, jnp.maximum(rows.prompt, tokens))
        )
        full = jnp.minimum(full, divide(known, jnp.maximum(field(groups, GroupField.SCALE), 1)))
    due = jnp.where(served[:, None], jnp.maximum(full - rows.cached, 0), 0)
    if turn is not None:
        units = tails.due(view, rows, turn, cacheable, full)
    else:
        tailed = jnp.any(groups[:, GroupField.TAIL] == 1)
        units = once(tailed, lambda: _tail(view, rows, cacheable, full, reached))
    if left is not None:
        units = jnp.where(cached & (left.tokens > 0), exports.units(view, rows, left), units)
    if known is not None:
        units = jnp.where(units <= known, units, 0)
    tail = jnp.where(served[:, None] & (units > 0), 1, 0)
    spans = cut(due + tail, room)
    counts, line, group = spans.counts, spans.line, spans.group
    row = lines[line]
    scale = jnp.maximum(groups[group, GroupField.SCALE], 1)
    inside = spans.within >= spans.of(due)
    column = spans.of(rows.cached) + spans.within
    unit = jnp.where(inside, spans.of(units), (column + 1) * scale)
    column = jnp.where(inside, divide(unit, scale), column)
    exported = None
    if left is not None:
        exported = spans.of(left.tokens) > 0
        column = jnp.where(inside & exported, spans.of(left.entry), column)
    block = state.rows[row, group, column]
    key = state.chains[row, unit - 1]
    sparse = jnp.any(groups[:, GroupField.PERIOD] != 0)
    left_out = once(sparse, lambda: _left_out(view, rows, cacheable, spans, column, left))
    if turn is not None or left is not None:
        left_out &= ~inside
    tail_lane = inside
    if left is not None and exported is not None:
        # The block has this state alone, and has had no key before.
        left_out |= exported & ~inside & (column == spans.of(left.entry))
        tail_lane &= ~exported
    kept = spans.live & (block != 0) & ~left_out
    refs = once(spans.used > 0, lambda: state.refs[block])
    lanes = tails.Lanes(line, group, column, block, unit, tail_lane)
    entry = block
    if turn is None:
        # A block that was registered with the prompt's tail is registered anew when it is full.
        bare = ((refs & 1) == 0) | ((groups[group, GroupField.TAIL] == 1) & ~inside)
        if known is not None:
            bare |= inside & jnp.any(state.keys[block, :4] != key, axis=1)
        kept &= bare
        order = running_sum(kept)
        number, total = order - 1, order[-1]
    else:
        entry = tails.entries(state, groups, lanes)
        kept &= tails.unknown(state, groups, lanes, refs, rows.cached, full)
        number, moved, total = tails.order_of(lanes, kept, turn.copies)
        state = numbered(state, turn.copies, moved)
    stamp = (state.counters[StepCounter.REGISTERED] + number).astype(jnp.uint32)
    words = jnp.concatenate([key, group.astype(jnp.uint32)[:, None], stamp[:, None]], axis=1)
    place = jnp.where(kept, block, state.refs.shape[0])
    if several(state):
        keys = tails.written(state, lanes, kept, full, entry, words)
    else:
        keys = state.keys.at[place].set(words, **DROP)
    counters = counted(state.counters, {StepCounter.REGISTERED: total})
    places = state.log.shape[0]
    noted = jnp.where(kept, stamp.astype(jnp.int32) & (places - 1), places)
    log = state.log.at[noted].set(entry, **DROP)
    refs = state.refs.at[place].set(refs | 1, **DROP)
    state = replace(state, refs=refs, keys=keys, log=log, counters=counters)
    rows = rows._replace(cached=rows.cached + jnp.minimum(counts, due))
    if rows.partial is not None:
        waits = kept & tail_lane & (groups[group, GroupField.TAIL] == 2)
        rows = rows._replace(partial=rows.partial.at[line, group].max(jnp.where(waits, column + 1, 0)))
    if left is not None:
        rows = exports.looked_at(rows, left, cached)
    return state, rows, spans.left


def _left_out(
    view: EveryGroup,
    rows: Rows,
    cacheable: jax.Array,
    spans: Spans,
    column: jax.Array,
    left: exports.Exports | None,
) -> jax.Array:
    """Mask bool[room] of lanes whose entries int32[room] sparse retention does not keep."""
    line, group = spans.line, spans.group
    period, shift = view.groups[group, GroupField.PERIOD], view.groups[group, GroupField.SHIFT]
    phase = remainder(jnp.maximum(column - shift, 0), jnp.maximum(period, 1))
    keep, end = view.groups[group, GroupField.KEEP], _retained(view, rows, cacheable, left)[line, group]
    kept = (period == 0) | ((column >= shift) & (phase >= period - keep))
    kept |= jnp.any((column[:, None] >= end - keep[:, None]) & (column[:, None] < end), axis=1)
    return ~kept


def _tail(
    view: EveryGroup, rows: Rows, cacheable: jax.Array, full: jax.Array, keys: jax.Array | None = None
) -> jax.Array:
    """Hash blocks up to the prompt's tail, where that is due in a block which is not full, int32[Q, G]; else 0.

    `hkv.dialects.vllm.rules.register`, where blocks of full attention hold several hash blocks. There a block that is
    full has the tail's key besides: nobody looks for that one, since hits end with blocks.
    """
    prompt = spread(view.groups, rows.prompt)
    hash_block = jnp.maximum(view.whole(CacheField.HASH_BLOCK), 1)
    units = reusable(view, None, prompt, jnp.full_like(prompt, UNLIMITED) if keys is None else keys)
    scale = jnp.maximum(view.group(None, GroupField.SCALE), 1)
    column = divide(units, scale)
    inside = (remainder(units, scale) != 0) & (column >= full) & (column < rows.length)
    due = (view.group(None, GroupField.TAIL) == 1) & inside & (units * hash_block <= cacheable)
    return jnp.where(due, units, 0)

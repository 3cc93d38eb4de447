"""Registration of the blocks that a step fills, under the keys of the tokens up to their ends."""

# jax.numpy types some of its own arguments as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hkv.cache import tails
from hkv.cache.copies import numbered
from hkv.cache.queries import EveryGroup, Rows, block_sizes, field, spread
from hkv.cache.spans import DROP, Spans, count_up, cut, once, running_sum, several
from hkv.cache.state import PAD, StepCounter, StepState, counted, replace
from hkv.cache.token_hashing import keyed, lookahead
from hkv.dialects.vllm.rules import retire
from hkv.dialects.vllm.rules.hit import resumable
from hkv.dialects.vllm.rules.parameters import CacheField, GroupField, Parameters
from hkv.dialects.vllm.rules.reads import UNLIMITED
from hkv.dialects.vllm.rules.register import cacheable_tokens, reusable
from hkv.state.loops import ceil_divide, divide, remainder


def _retained(view: EveryGroup, rows: Rows, cacheable: jax.Array, left: Exports | None) -> jax.Array:
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
    ends = jnp.stack([*retire.expected_ends(view, None, prompt, shared), tail], axis=2)
    return jnp.where(view.cache[CacheField.RETAINED] != 0, ends, 0)


def register(
    parameters: Parameters,
    state: StepState,
    lines: jax.Array,
    rows: Rows,
    tokens: jax.Array,
    served: jax.Array,
    room: int,
    turn: tails.StepFacts | None = None,
    left: Exports | None = None,
) -> tuple[StepState, Rows, jax.Array, jax.Array]:
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
      The state; the rows' fields, with the entries looked at; tokens up to the end of the last key that each query and
      group registered, int32[Q, G], 0 for none; and how many wait, int32[].
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
        # Blocks whose keys cover tokens that are not computed yet have no key to stand under.
        full = jnp.minimum(full, divide(known, jnp.maximum(field(groups, GroupField.SCALE), 1)))
    due = jnp.where(served[:, None], jnp.maximum(full - rows.cached, 0), 0)
    if turn is not None:
        units = tails.due(view, rows, turn, cacheable, full)
    else:
        tailed = jnp.any(groups[:, GroupField.TAIL] == 1)
        units = once(tailed, lambda: _tail(view, rows, cacheable, full, reached))
    if left is not None:
        units = jnp.where(cached & (left.tokens > 0), export_units(view, rows, left), units)
    if known is not None:
        units = jnp.where(units <= known, units, 0)
    # One lane more for a row and group with a key that ends inside a block, behind its full blocks: vLLM registers it
    # last.
    tail = jnp.where(served[:, None] & (units > 0), 1, 0)
    spans = cut(due + tail, room)
    counts, line, group = spans.counts, spans.line, spans.group
    row = lines[line]
    scale = jnp.maximum(groups[group, GroupField.SCALE], 1)
    # The lane behind the full blocks.
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
    # The order of registration, which decides between blocks under one key: the first one is found.
    stamp = (state.counters[StepCounter.REGISTERED] + number).astype(jnp.uint32)
    words = jnp.concatenate([key, group.astype(jnp.uint32)[:, None], stamp[:, None]], axis=1)
    place = jnp.where(kept, block, state.refs.shape[0])
    if several(state):
        keys = tails.written(state, lanes, kept, full, entry, words)
    else:
        keys = state.keys.at[place].set(words, **DROP)
    # Read before it is advanced: stamps count from the old number.
    counters = counted(state.counters, {StepCounter.REGISTERED: total})
    places = state.log.shape[0]
    noted = jnp.where(kept, stamp.astype(jnp.int32) & (places - 1), places)
    log = state.log.at[noted].set(entry, **DROP)
    # The low bit says registered; references count in twos, so that one array holds both.
    refs = state.refs.at[place].set(refs | 1, **DROP)
    state = replace(state, refs=refs, keys=keys, log=log, counters=counters)
    # Only lanes that had room: the rest are looked at by a later step (`deferred`).
    rows = rows._replace(cached=rows.cached + jnp.minimum(counts, due))
    if rows.partial is not None:
        waits = kept & tail_lane & (groups[group, GroupField.TAIL] == 2)
        rows = rows._replace(partial=rows.partial.at[line, group].max(jnp.where(waits, column + 1, 0)))
    if left is not None:
        rows = looked_at(rows, left, cached)
    units = jnp.zeros_like(due).at[line, group].max(jnp.where(kept, unit, 0), **DROP)
    return state, rows, units * jnp.maximum(parameters.cache[CacheField.HASH_BLOCK], 1), spans.left


def _left_out(
    view: EveryGroup,
    rows: Rows,
    cacheable: jax.Array,
    spans: Spans,
    column: jax.Array,
    left: Exports | None,
) -> jax.Array:
    """Mask bool[room] of lanes whose entries int32[room] sparse retention does not keep."""
    line, group = spans.line, spans.group
    period, shift = view.groups[group, GroupField.PERIOD], view.groups[group, GroupField.SHIFT]
    phase = remainder(jnp.maximum(column - shift, 0), jnp.maximum(period, 1))
    keep, end = view.groups[group, GroupField.KEEP], _retained(view, rows, cacheable, left)[line, group]
    # The last `keep` of each period, as `hkv.dialects.vllm.rules.retire.Kept` says one by one.
    kept = (period == 0) | ((column >= shift) & (phase >= period - keep))
    kept |= jnp.any((column[:, None] >= end - keep[:, None]) & (column[:, None] < end), axis=1)
    return ~kept


def _tail(
    view: EveryGroup, rows: Rows, cacheable: jax.Array, full: jax.Array, keys: jax.Array | None = None
) -> jax.Array:
    """Hash blocks up to the prompt's tail, where that is due in a block which is not full, int32[Q, G]; else 0.

    `hkv.dialects.vllm.rules.register`, where blocks of full attention hold several hash blocks. There a block that is
    full has the tail's key besides: no lookup asks for that one, since hits end with blocks.
    """
    prompt = spread(view.groups, rows.prompt)
    hash_block = jnp.maximum(view.whole(CacheField.HASH_BLOCK), 1)
    units = reusable(view, None, prompt, jnp.full_like(prompt, UNLIMITED) if keys is None else keys)
    scale = jnp.maximum(view.group(None, GroupField.SCALE), 1)
    column = divide(units, scale)
    inside = (remainder(units, scale) != 0) & (column >= full) & (column < rows.length)
    due = (view.group(None, GroupField.TAIL) == 1) & inside & (units * hash_block <= cacheable)
    return jnp.where(due, units, 0)


# States that a chunk leaves behind inside it, so that its prompt can be resumed close to its end: prefill
# checkpoints.
#
# vLLM 0.33 `MambaManager`; one by one in `hkv.dialects.vllm.rules.export`. The chunk is planned, served and
# registered in one step: nothing of it is left to later ones. Its block stands at the entry before the running
# state's, whatever length its state has, and under no other key than that length's: the row does not look at that
# entry again.


class Exports(NamedTuple):
    """States inside the chunks of Q queries, int32[Q, G] each; 0 for queries and groups without.

    Attributes:
      tokens: tokens of the request that each stands after.
      entry: entry of the row where its block is.
    """

    tokens: jax.Array
    entry: jax.Array

    def only(self, kept: jax.Array) -> Exports:
        """Those of queries that are `kept` bool[Q]."""
        return Exports(*(jnp.where(kept[:, None], values, 0) for values in self))


def possible(view: EveryGroup, start: jax.Array, end: jax.Array, prefill: jax.Array) -> Exports:
    """States that chunks from `start` to `end` int32[Q] may leave behind, of requests that come with `prefill` tokens.

    vLLM 0.33 `MambaManager._needs_internal_checkpoint`, `is_mamba_prefill_checkpoint_valid`: the chunk starts on a hash
    block, spans at least two entries' ends, and reaches the state's place after at least one hash block, a multiple of
    the kernel's step from its start.
    """
    start, end, prefill = (spread(view.groups, tokens) for tokens in (start, end, prefill))
    step, hash_block = view.group(None, GroupField.EXPORT_STEP), view.whole(CacheField.HASH_BLOCK)
    size = jnp.broadcast_to(block_sizes(view.groups), end.shape)
    place = resumable(view, end, jnp.maximum(view.group(None, GroupField.EXPORT_UNIT), 1))
    # The chunk's running state stands in the last entry, the one it leaves behind before it.
    entry = ceil_divide(end, size) - 2
    due = (step > 0) & (remainder(start, jnp.maximum(hash_block, 1)) == 0) & (entry >= ceil_divide(start, size))
    due &= (start + hash_block <= place) & (place < end)
    due &= remainder(jnp.maximum(place - start, 0), jnp.maximum(step, 1)) == 0
    due &= (view.group(None, GroupField.EXPORT_LAST) == 0) | (end >= prefill)
    return Exports(jnp.where(due, place, 0), jnp.where(due, entry, 0))


def plan(view: EveryGroup, state: StepState, lines: jax.Array, rows: Rows, counts: jax.Array) -> Exports:
    """States that the chunks of `counts` int32[Q] tokens will leave behind, if they are served.

    The state's entry must be empty, or a state for drafts: rows that had drafts in single operations may be longer than
    their tokens.

    Args:
      view: the configuration.
      state: the cache.
      lines: int32[Q], the row of each query.
      rows: their fields.
      counts: int32[Q]; 0 for queries that compute nothing.
    """
    assert rows.grown is not None
    assert rows.prefill is not None
    prefill = jnp.maximum(rows.prefill[:, 0], rows.prompt)
    found = possible(view, rows.computed, rows.computed + counts, prefill).only(counts > 0)
    scratch = jnp.where(rows.grown != 0, view.group(None, GroupField.SCRATCH), 0)
    held = (found.tokens > 0) & (found.entry < rows.length - scratch)
    group = count_up(view.groups.shape[0])[None]
    block = once(jnp.any(held), lambda: state.rows[lines[:, None], group, found.entry])
    free = ~held | (block == 0)
    return Exports(*(jnp.where(free, values, 0) for values in found))


def export_units(view: EveryGroup, rows: Rows, exports: Exports) -> jax.Array:
    """Hash blocks up to the keys of the states that a request could resume from, int32[Q, G]; 0 for none.

    That is the prompt's last one, those that retention keeps, and one where others branched off
    (vLLM 0.33 `MambaManager._cache_partial_tail_block`).
    """
    tokens = exports.tokens
    prompt, shared = (spread(view.groups, length) for length in (rows.prompt, rows.shared_prefix))
    size = jnp.broadcast_to(block_sizes(view.groups), tokens.shape)
    period = view.group(None, GroupField.PERIOD)
    last = tokens == resumable(view, prompt, jnp.maximum(view.group(None, GroupField.EXPORT_UNIT), 1))
    retained = (period == 0) | (remainder(divide(tokens, size), jnp.maximum(period, 1)) == 0)
    wanted = last | ((remainder(tokens, size) == 0) & retained) | (tokens == shared)
    return jnp.where(wanted, divide(tokens, jnp.maximum(view.whole(CacheField.HASH_BLOCK), 1)), 0)


def noted(rows: Rows, exports: Exports, taking: jax.Array) -> Rows:
    """The rows' fields with the states of queries that are `taking` bool[Q] tokens: none where they are refused."""
    assert rows.export is not None
    assert rows.export_entry is not None
    pairs = zip(exports, (rows.export, rows.export_entry), strict=True)
    tokens, entry = (jnp.where(taking[:, None], new, old) for new, old in pairs)
    return rows._replace(export=tokens, export_entry=entry)


def looked_at(rows: Rows, exports: Exports, cached: jax.Array) -> Rows:
    """The rows' fields when no entry up to the state's is looked at again, in groups that are `cached` bool[1, G].

    vLLM 0.33 may: when more tokens have keys, it would take such a block, if it still stands, for one with the state at
    its end.
    """
    past = jnp.where(cached & (exports.tokens > 0), exports.entry + 1, 0)
    return rows._replace(cached=jnp.maximum(rows.cached, past))


def answer(state: StepState, lines: jax.Array, computed: jax.Array, exports: Exports) -> jax.Array:
    """Tokens of each query after which a state is to be written, and the block, int32[Q, G, 2]; -1 twice for none.

    Args:
      state: the cache, after the step.
      lines: int32[Q], the row of each query.
      computed: int32[Q], tokens before the step.
      exports: the states.
    """
    group = count_up(state.rows.shape[1])[None]
    block = state.rows[lines[:, None], group, exports.entry]
    # An entry that is null takes no state.
    there = (exports.tokens > 0) & (block != 0)
    pairs = jnp.stack([exports.tokens - computed[:, None], block], axis=2)
    return jnp.where(there[:, :, None], pairs, PAD)

"""States that a chunk leaves behind inside it, so that its prompt can be resumed close to its end: prefill checkpoints.

vLLM 0.33 `MambaManager`; one by one in `hkv.dialects.vllm.rules.export`. The chunk is planned, served and registered in
one step: nothing of it is left to later ones. Its block stands at the entry before the running state's, whatever length
its state has, and under no other key than that length's: the row does not look at that entry again.
"""

# jax.numpy types some of its own arguments as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hkv.cache.queries import EveryGroup, Rows, block_sizes, spread
from hkv.cache.spans import count_up, once
from hkv.cache.state import PAD, StepState
from hkv.dialects.vllm.rules.hit import resumable
from hkv.dialects.vllm.rules.parameters import CacheField, GroupField
from hkv.state.loops import ceil_divide, divide, remainder


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


def units(view: EveryGroup, rows: Rows, exports: Exports) -> jax.Array:
    """Hash blocks up to the keys of the states that somebody could resume from, int32[Q, G]; 0 for none.

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
    there = (exports.tokens > 0) & (block != 0)
    pairs = jnp.stack([exports.tokens - computed[:, None], block], axis=2)
    return jnp.where(there[:, :, None], pairs, PAD)

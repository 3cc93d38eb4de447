"""Keys that end inside blocks, where hits may end there: a prompt's tail, and the state at it or where others branched.

vLLM 0.33 `FullAttentionManager.cache_blocks` and `MambaManager._cache_partial_tail_block`; one by one in
`hkv.dialects.vllm.rules.register`.
"""

# jax.numpy types some of its own arguments as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from hkv.cache.copies import Copies
from hkv.cache.queries import EveryGroup, Rows, spread
from hkv.cache.spans import DROP, first_words, once, registered, running_sum, several
from hkv.cache.state import ERA, OWN_ERA, StepState
from hkv.dialects.vllm.rules.hit import resumable
from hkv.dialects.vllm.rules.parameters import CacheField, GroupField
from hkv.dialects.vllm.rules.reads import UNLIMITED
from hkv.dialects.vllm.rules.register import cacheable_tokens, reusable
from hkv.state.loops import divide, remainder


class StepFacts(NamedTuple):
    """Facts of a step by which a key that ends inside a block may be due.

    Attributes:
      before: int32[Q], tokens computed before.
      fresh: bool[Q, G], whether it is the row's first step.
      copies: the step's copies.
    """

    before: jax.Array
    fresh: jax.Array
    copies: Copies


class Lanes(NamedTuple):
    """Blocks of `hkv.cache.registration.register`, one a lane: int32[n] each, but `tail`.

    Attributes:
      line: the query.
      group: the group.
      column: the entry of its row.
      block: the block.
      unit: hash blocks up to the key's end.
      tail: bool[n], whether the key ends inside the block.
    """

    line: jax.Array
    group: jax.Array
    column: jax.Array
    block: jax.Array
    unit: jax.Array
    tail: jax.Array


def due(view: EveryGroup, rows: Rows, turn: StepFacts, cacheable: jax.Array, full: jax.Array) -> jax.Array:
    """Hash blocks up to a key that is due inside a block, int32[Q, G]; 0 where none is.

    A prompt's tail in full attention is due when it is computed, when its block is full, which takes it the key that it
    had, and in a row's first step. A state is due if it stands where the prompt could be resumed, or at the length
    up to which another request shares its prefix.

    Args:
      view: the configuration.
      rows: the rows' fields, after the step's tokens.
      turn: the step.
      cacheable: int32[Q, G], tokens that may be registered.
      full: int32[Q, G], blocks that they fill.
    """
    prompt, shared = (spread(view.groups, tokens) for tokens in (rows.prompt, rows.shared_prefix))
    before = spread(view.groups, turn.before)
    hash_block = jnp.maximum(view.whole(CacheField.HASH_BLOCK), 1)
    scale = jnp.maximum(view.group(None, GroupField.SCALE), 1)
    kind = view.group(None, GroupField.TAIL)

    last = reusable(view, None, prompt, jnp.full_like(prompt, UNLIMITED))
    column = divide(last, scale)
    filled = (column >= rows.cached) & (column < full)
    fresh = turn.fresh | (last * hash_block > cacheable_tokens(view, None, before)) | filled
    of_prompt = jnp.where((last * hash_block <= cacheable) & fresh, last, 0)

    ahead = (view.whole(CacheField.SHARED_BOUNDARIES) != 0) & (before < shared) & (shared <= prompt)
    stands = (cacheable == resumable(view, prompt, hash_block)) | (ahead & (cacheable == shared))
    of_state = jnp.where(stands & (remainder(cacheable, hash_block) == 0), divide(cacheable, hash_block), 0)

    units = jnp.where(kind == 2, of_state, jnp.where(kind == 1, of_prompt, 0))
    within = (remainder(units, scale) != 0) & (divide(units, scale) < rows.length)
    return jnp.where(within, units, 0)


def entries(state: StepState, groups: jax.Array, lanes: Lanes) -> jax.Array:
    """The entry of each block and key (`hkv.cache.spans`), int32[n]. A state has one, wherever it stands."""
    if not several(state):
        return lanes.block
    scale = jnp.maximum(groups[lanes.group, GroupField.SCALE], 1)
    part = jnp.where(lanes.tail & (groups[lanes.group, GroupField.TAIL] == 1), remainder(lanes.unit, scale), 0)
    return part * state.refs.shape[0] + lanes.block


def unknown(
    state: StepState, groups: jax.Array, lanes: Lanes, refs: jax.Array, cached: jax.Array, full: jax.Array
) -> jax.Array:
    """True for blocks that do not stand under their lane's key, or lose it as they are registered when they are full.

    Args:
      state: the cache.
      groups: int32[G, 32], of the configuration.
      lanes: the blocks.
      refs: int32[n], of the blocks.
      cached: int32[Q, G], entries looked at before.
      full: int32[Q, G], blocks that are full.
    """
    anew = groups[lanes.group, GroupField.TAIL] == 1
    filled = (lanes.column >= cached[lanes.line, lanes.group]) & (lanes.column < full[lanes.line, lanes.group])
    held = once(jnp.any(lanes.tail), lambda: registered(state, entries(state, groups, lanes)))
    known = jnp.where(lanes.tail, held, (refs & 1) != 0)
    return ~known | (anew & filled)


def order_of(lanes: Lanes, kept: jax.Array, copies: Copies) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Turns of lanes that are `kept` bool[n] and of copies that took over keys: each row's copies before its blocks.

    Returns:
      int32[n] and int32[Q, G], counted from 0, and how many there are in all, int32[].
    """
    before = running_sum(copies.moved.reshape(-1)).reshape(copies.moved.shape)
    earlier = jnp.zeros_like(copies.source[:, 0]).at[lanes.line].add(kept.astype(jnp.int32))
    earlier = running_sum(earlier) - earlier
    sums = running_sum(kept)
    lane = sums - 1 + before[lanes.line, -1]
    return lane, before - 1 + earlier[:, None], sums[-1] + before[-1, -1]


def written(
    state: StepState, lanes: Lanes, kept: jax.Array, full: jax.Array, entry: jax.Array, words: jax.Array
) -> jax.Array:
    """The keys, where blocks may have several entries, with those of the lanes that are `kept` bool[n].

    Args:
      state: the cache.
      lanes: the blocks.
      kept: bool[n].
      full: int32[Q, G], blocks that are full.
      entry: int32[n], from `entries`.
      words: uint32[n, 6].
    """
    size = state.keys.shape[0]
    # A key that ends inside a block which is full stands next to the whole block's. Otherwise others go.
    begins = kept & (~lanes.tail | (lanes.column >= full[lanes.line, lanes.group]))
    made = first_words(state, words[:, :4], words[:, 4].astype(jnp.int32), words[:, 5])[:, ERA]
    own = jnp.full_like(entry, OWN_ERA)
    keys = state.keys.at[jnp.where(begins, lanes.block, size), own].set(made, **DROP)
    # Read once, between the writes: repeated behind them, the gather would need the old keys, and a copy of them.
    era, keys = lax.optimization_barrier((keys[lanes.block, OWN_ERA], keys))
    place = jnp.where(kept, entry, size)
    return keys.at[place, :OWN_ERA].set(jnp.concatenate([words, era[:, None]], axis=1), **DROP)

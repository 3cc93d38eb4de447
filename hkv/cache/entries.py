"""Entries of the index: keys that blocks stand under, of which a block of full attention may have several.

Entry b is block b under its only key, or under the key of the whole block. Where hits end inside blocks of full
attention (`entry_parts`), entry p * N + b is block b of N under the key of its first p hash blocks. A block's entries
count while they are of its era, which begins with the first key that it gets after it had none, or lost those it had.
"""

# jax.numpy types some of its own arguments as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import jax
import jax.numpy as jnp

from hkv.cache.state import ERA, OWN_ERA, StepRequest, StepRow, StepState, row_fields
from hkv.state.loops import remainder


def several(state: StepState) -> bool:
    """True if blocks may have several entries; static."""
    return state.keys.shape[0] > state.refs.shape[0]


def holder(state: StepState, entries: jax.Array) -> jax.Array:
    """The block of each entry."""
    return remainder(entries, jnp.full_like(entries, state.refs.shape[0])) if several(state) else entries


def registered(state: StepState, entries: jax.Array) -> jax.Array:
    """True for entries under whose keys their blocks can be found."""
    if not several(state):
        return state.refs[entries] % 2 == 1
    block = holder(state, entries)
    return (state.refs[block] % 2 == 1) & (state.keys[entries, ERA] == state.keys[block, OWN_ERA])


def first_words(state: StepState, keys: jax.Array, groups: jax.Array, stamps: jax.Array) -> jax.Array:
    """Rows of `StepState.keys` for blocks that had no key before, or lose those they had.

    Args:
      state: the cache, for its shapes.
      keys: uint32[n, 4].
      groups: int32[n].
      stamps: uint32[n], how many blocks were registered before.
    """
    words = jnp.concatenate([keys, groups.astype(jnp.uint32)[:, None], stamps[:, None]], axis=1)
    if not several(state):
        return words
    # Eras are counted from 1: no entry that was never written is of one.
    return jnp.concatenate([words, stamps[:, None] + jnp.uint32(1), stamps[:, None] + jnp.uint32(1)], axis=1)


def own(state: StepState, blocks: jax.Array) -> jax.Array:
    """The entry under its only key, or the whole block's, of each block; past all entries for none of the pool."""
    if not several(state):
        return blocks
    return jnp.where(blocks < state.refs.shape[0], blocks, state.keys.shape[0])


def inside(state: StepState) -> bool:
    """True if hits may end inside blocks; static."""
    return StepRow.PARTIAL in row_fields(field_count(state))


def field_count(state: StepState) -> int:
    """Fields of each group in a row's line of requests; static."""
    return (state.requests.shape[1] - len(StepRequest)) // state.rows.shape[1]


def leaves_states(state: StepState) -> bool:
    """True if chunks may leave states behind inside them; static."""
    return StepRow.EXPORT in row_fields(field_count(state))

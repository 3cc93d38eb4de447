"""Index from keys to the blocks registered under them: a hash table that is brought up to date when requests arrive.

Where blocks have several keys, it is one to entries (`hkv.cache.spans`).

A step only notes in `StepState.log` which blocks it registers; nothing is done as blocks lose their keys. A slot of the
table names a block, and means something while that block is registered under a key that belongs near the slot; other
slots are used again. So what a request costs when it arrives is its prompt, and what was registered since the last one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from hkv.cache.spans import DROP, count_up
from hkv.cache.spans import registered as is_registered
from hkv.cache.state import StepCounter, StepState, replace

LANES = 512
"""Blocks that are put into the table side by side."""

MIX = 0x9E3779B1
"""Odd; sets the groups of one prefix apart."""


def bring_up_to_date(state: StepState) -> StepState:
    """The state with every registered block in its index.

    Where more blocks were registered than the log has places for, every block of the pool is looked at: that many have
    been registered since.
    """
    places, blocks = state.log.shape[0], state.keys.shape[0]
    registered, begin = state.counters[StepCounter.REGISTERED], state.counters[StepCounter.INDEXED]
    behind = (registered - begin).astype(jnp.uint32)
    lost = behind > places
    count = jnp.where(lost, blocks, behind.astype(jnp.int32))

    def batch(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        first, index, probes = carry
        lane = first + count_up(LANES)
        block = jnp.where(lost, jnp.minimum(lane, blocks - 1), state.log[(begin + lane) & (places - 1)])
        live = (lane < count) & is_registered(state, block)
        return first + LANES, *_put(state, index, probes, block, live)

    carry = jnp.zeros_like(count), state.index, state.counters[StepCounter.PROBES]
    _, index, probes = lax.while_loop(lambda carry: carry[0] < count, batch, carry)
    counters = state.counters.at[StepCounter.INDEXED].set(registered).at[StepCounter.PROBES].set(probes)
    return replace(state, index=index, counters=counters)


def look_up(state: StepState, groups: jax.Array, keys: jax.Array, asked: jax.Array) -> jax.Array:
    """The block registered first under each key, of those that the index has; 0 for none.

    Args:
      state: the cache, its index up to date.
      groups: int32[n].
      keys: uint32[n, 4].
      asked: bool[n]; nothing is found for the others.

    Returns:
      int32[n].
    """
    at = _home(state.index, keys[:, 0], groups.astype(jnp.uint32))
    registered = state.counters[StepCounter.REGISTERED].astype(jnp.uint32)

    def look(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        distance, oldest, found = carry
        block = state.index[(at + distance) & (state.index.shape[0] - 1)]
        words = state.keys[block]
        same = asked & is_registered(state, block) & (words[:, 4] == groups.astype(jnp.uint32))
        age = registered - words[:, 5]
        same &= jnp.all(words[:, :4] == keys, axis=1) & (age > oldest)
        return distance + 1, jnp.where(same, age, oldest), jnp.where(same, block, found)

    probes = jnp.where(jnp.any(asked), state.counters[StepCounter.PROBES], -1)
    carry = jnp.zeros_like(probes), jnp.zeros_like(keys[:, 0]), jnp.zeros_like(asked, dtype=jnp.int32)
    return lax.while_loop(lambda carry: carry[0] <= probes, look, carry)[2]


def _put(
    state: StepState, index: jax.Array, probes: jax.Array, block: jax.Array, live: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The table with `live` blocks in it, each in the first slot from its key's on that means nothing; and `PROBES`."""
    size = index.shape[0]
    at = _home(index, state.keys[block, 0], state.keys[block, 4])

    def claim(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        waiting, distance, index, probes = carry
        slot = (at + distance) & (size - 1)
        # Read before the table is written: fused into what follows, the read would need the old one, and a copy of it.
        held, index = lax.optimization_barrier((index[slot], index))
        away = (slot - _home(index, state.keys[held, 0], state.keys[held, 4])) & (size - 1)
        taken = is_registered(state, held) & (away <= probes)
        claimed = jnp.where(waiting & ~taken & (held != block), slot, size)
        index = index.at[claimed].set(0, **DROP).at[claimed].max(block, **DROP)
        done = waiting & (index[slot] == block)
        probes = jnp.maximum(probes, jnp.max(jnp.where(done, distance, 0)))
        return waiting & ~done, distance + 1, index, probes

    carry = live, jnp.zeros_like(at), index, probes
    *_, index, probes = lax.while_loop(lambda carry: jnp.any(carry[0]), claim, carry)
    return index, probes


def _home(index: jax.Array, first: jax.Array, group: jax.Array) -> jax.Array:
    """The slot at which keys with the first words uint32[n] are looked for first, of groups uint32[n]."""
    return ((first ^ (group * jnp.uint32(MIX))) & jnp.uint32(index.shape[0] - 1)).astype(jnp.int32)

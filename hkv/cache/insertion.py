"""Blocks that come from outside the cache: free ones, registered under given keys, where `arrive` finds them."""

# jax.numpy types some of its own arguments as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from hkv.cache.arrivals import hold
from hkv.cache.key_index import bring_up_to_date, look_up
from hkv.cache.spans import DROP, count_up, first_words, holder, own, running_sum, unified
from hkv.cache.state import PAD, StepCounter, StepState, replace
from hkv.state.status import Status


def insert(state: StepState, groups: jax.Array, keys: jax.Array) -> tuple[StepState, jax.Array, jax.Array]:
    """Registers blocks under keys, as if a request had held them, and had given them back in this order.

    A key that its group has already, or that an earlier one repeats, takes no block. The others take the next free
    blocks, whose keys are dropped. All that are free, old and new, move to the free queue's tail, the first to be
    evicted first. A pure function, not jitted itself.

    Args:
      state: the cache.
      groups: int32[K]; -1 for none.
      keys: uint32[K, 4].

    Returns:
      The state; the new block of each key, int32[K], -1 for none; and a status int32[]: OUT_OF_RANGE for a group that
      does not exist, NO_ROOM for more new blocks than are free; both took nothing.
    """
    state, groups, keys = unified(state, groups, keys)
    state, size = bring_up_to_date(state), state.queue.shape[0]
    exists = (groups >= 0) & (groups < state.rows.shape[1])
    *words, order = lax.sort((*keys.T, groups, count_up(groups.shape[0])), num_keys=6)
    # Sorted, equal keys are neighbours; the sort's last word is the lane, so that the first one stays.
    again = jnp.all(jnp.stack([word == jnp.roll(word, 1) for word in words]), axis=0).at[0].set(False)
    asked = exists & ~jnp.zeros_like(again).at[order].set(again)
    # A block that is there already is used, not replaced: it moves to the tail like one that a request gave back.
    had = holder(state, look_up(state, groups, keys, asked))

    new = asked & (had == 0)
    waiting = (had > 0) & (state.refs[had] < 2)
    head, tail = state.counters[StepCounter.HEAD], state.counters[StepCounter.TAIL]
    lacks = running_sum(new)[-1] + running_sum(waiting)[-1] > tail - head
    outside = jnp.any((groups != PAD) & ~exists)
    status = jnp.where(lacks, int(Status.NO_ROOM), int(Status.OK))
    status = jnp.where(outside, int(Status.OUT_OF_RANGE), status).astype(jnp.int32)
    new, had = new & (status == int(Status.OK)), jnp.where(status == int(Status.OK), had, 0)

    state = hold(state, had)
    head = state.counters[StepCounter.HEAD]
    order = running_sum(new)
    block = jnp.where(new, state.queue[(head + order - 1) & (size - 1)], state.refs.shape[0])
    evicted = jnp.sum(state.refs.at[block].get(mode="fill", fill_value=0, wrap_negative_indices=False), dtype=jnp.int32)
    stamp = (state.counters[StepCounter.REGISTERED] + order - 1).astype(jnp.uint32)
    words = first_words(state, keys, groups, stamp)
    refs = state.refs.at[block].set(1, **DROP).at[jnp.where(had > 0, had, state.refs.shape[0])].add(-2, **DROP)
    last = jnp.where(had > 0, had, block)
    back = (last < refs.shape[0]) & (refs.at[last].get(mode="fill", fill_value=2, wrap_negative_indices=False) < 2)
    tail, behind = state.counters[StepCounter.TAIL], running_sum(back)
    queue = state.queue.at[jnp.where(back, (tail + behind - 1) & (size - 1), size)].set(last, **DROP)
    counters = state.counters.at[StepCounter.HEAD].add(order[-1]).at[StepCounter.TAIL].add(behind[-1])
    counters = counters.at[StepCounter.REGISTERED].add(order[-1]).at[StepCounter.EVICTIONS].add(evicted)
    noted = jnp.where(new, stamp.astype(jnp.int32) & (size - 1), size)
    log = state.log.at[noted].set(block, **DROP)
    keyed = state.keys.at[own(state, block)].set(words, **DROP)
    state = replace(state, queue=queue, refs=refs, keys=keyed, log=log, counters=counters)
    return state, jnp.where(new, block, PAD), status

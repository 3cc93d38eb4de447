"""Copies of blocks that a row may not write: a hit ends inside them, or the cache keeps the state that they hold.

Copy-on-write as in vLLM 0.33 (`SingleTypeKVCacheManager.allocate_new_blocks`, `MambaManager`): a row that came by a hit
goes on in the copy, and the block stays as it is. A row whose own running state was registered inside a block goes on
in place, and the copy takes over its key; only where other rows wait to copy that block is it the owner that moves, as
here a row copies in its own first step, not when it arrives. A copy and its block are held until the step ends, and
copied before anything of it is written.
"""

# jax.numpy types some of its own arguments as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hkv.cache.queries import Rows
from hkv.cache.spans import DROP, count_up, cut, first_words, once, own, running_sum
from hkv.cache.state import PAD, StepCounter, StepState, replace


class Copies(NamedTuple):
    """Copies of Q queries, one a group at most.

    Attributes:
      needed: bool[Q, G], whether a copy is needed.
      kept: bool[Q, G], whether the copy is the cache's, and its row goes on in place.
      moved: bool[Q, G], whether such a copy took over its block's key.
      source: int32[Q, G], the block; 0 for none.
      target: int32[Q, G], its copy; 0 for none.
    """

    needed: jax.Array
    kept: jax.Array
    moved: jax.Array
    source: jax.Array
    target: jax.Array

    def pairs(self) -> jax.Array:
        """Block and copy, int32[Q, G, 2]; -1 twice for none."""
        return jnp.where(self.needed[:, :, None], jnp.stack([self.source, self.target], axis=2), PAD)


def take(
    state: StepState,
    lines: jax.Array,
    rows: Rows,
    length: jax.Array,
    need: jax.Array,
    served: jax.Array,
    room: int,
) -> tuple[StepState, Copies]:
    """Hands out blocks as `hkv.cache.blocks.take`, and before those of each row and group the target of its copy.

    Args:
      state: the cache.
      lines: int32[Q], the row of each line.
      rows: their fields before the step, with those of rows that copy.
      length: int32[Q, G], entries that they will have.
      need: int32[Q, G], blocks for the last of them.
      served: bool[Q], which rows are given blocks.
      room: lanes, which suffice.
    """
    partial, grown = rows.partial, rows.grown
    assert partial is not None
    assert grown is not None
    needed = (partial > 0) & served[:, None]
    entry = jnp.maximum(partial - 1, 0)
    groups = count_up(partial.shape[1])[None]
    source = once(jnp.any(needed), lambda: state.rows[lines[:, None], groups, entry])
    source = jnp.where(needed, source, 0)
    # Read once, before blocks are counted out: read again later, the gather would need all references as they were.
    held = once(jnp.any(needed), lambda: state.refs[source])
    kept = needed & (grown != 0) & (held < 4)
    moved = kept & (held % 2 == 1)

    spans = cut(need + needed.astype(jnp.int32), room)
    line, group = spans.line, spans.group
    first = spans.of(needed) & (spans.within == 0)
    column = spans.of(length) - spans.of(need) + spans.within - spans.of(needed).astype(jnp.int32)
    column = jnp.where(first, spans.of(entry), column)
    head, size = state.counters[StepCounter.HEAD], state.refs.shape[0]
    block = state.queue[(head + count_up(room)) & (state.queue.shape[0] - 1)]
    block = jnp.where(spans.live, block, size)
    known = once(
        spans.used > 0, lambda: state.refs.at[block].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    )
    counters = state.counters.at[StepCounter.HEAD].add(spans.used)
    counters = counters.at[StepCounter.EVICTIONS].add(jnp.sum(known, dtype=jnp.int32))
    # What was read says where to write: else XLA may read later, and copies all rows, or references, for that.
    written = spans.live & ~(first & spans.of(kept)) & (spans.of(source) >= 0)
    column = jnp.where(written, column, state.rows.shape[2])
    reads = (known >= 0) & (spans.of(held) >= 0)
    refs = state.refs.at[jnp.where(reads, block, 0)].set(2, **DROP)
    tables = state.rows.at[lines[line], group, column].set(block, **DROP)
    target = jnp.where(needed, block[jnp.minimum(spans.starts, room - 1)].reshape(needed.shape), 0)
    state = replace(state, refs=refs, rows=tables, counters=counters)
    copies = Copies(needed, kept, moved, source, target)
    return _keys_moved(state, copies), copies


def _keys_moved(state: StepState, copies: Copies) -> StepState:
    """The state with copies that are kept under the keys of their blocks. `register` says since when (`numbered`)."""
    size = state.refs.shape[0]
    known = copies.moved.reshape(-1)
    source = jnp.where(known, copies.source.reshape(-1), size)
    target = jnp.where(known, copies.target.reshape(-1), size)
    words = once(jnp.any(known), lambda: state.keys.at[source].get(mode="clip"))
    stamp = state.counters[StepCounter.REGISTERED].astype(jnp.uint32) + count_up(known.shape[0]).astype(jnp.uint32)
    words = first_words(state, words[:, :4], words[:, 4].astype(jnp.int32), stamp)
    keys = state.keys.at[own(state, target)].set(words, **DROP)
    refs = state.refs.at[source].add(-1, **DROP).at[target].add(1, **DROP)
    return replace(state, keys=keys, refs=refs)


def numbered(state: StepState, copies: Copies, order: jax.Array) -> StepState:
    """The state with the copies that took over keys noted as registered, as the `order` int32[Q, G]-th since."""
    places, size = state.log.shape[0], state.refs.shape[0]
    target, known = copies.target.reshape(-1), copies.moved.reshape(-1)
    place = jnp.where(known, target, size)
    stamp = (state.counters[StepCounter.REGISTERED] + order.reshape(-1)).astype(jnp.uint32)
    column = jnp.full_like(place, 5)
    keys = state.keys.at[own(state, place), column].set(stamp, **DROP)
    log = state.log.at[jnp.where(known, stamp.astype(jnp.int32) & (places - 1), places)].set(target, **DROP)
    return replace(state, keys=keys, log=log)


def give_back(state: StepState, copies: Copies) -> StepState:
    """The copies' references are given back, group after group; blocks without references then become free.

    Those are what rows came by, and copies that are the cache's. Those with keys go to the queue's tail, the others to
    its head, the first of them foremost (vLLM 0.33 `BlockPool.free_blocks`).
    """
    size = state.refs.shape[0]
    let_go = jnp.where(copies.needed, jnp.where(copies.kept, copies.target, copies.source), 0).T.reshape(-1)
    turn = count_up(let_go.shape[0]) + 1
    held = let_go > 0
    block = jnp.where(held, let_go, size)
    refs = state.refs.at[block].add(-2, **DROP)
    marks = state.marks.at[block].set(0, **DROP).at[block].max(turn, **DROP)
    left = once(jnp.any(held), lambda: refs.at[block].get(mode="fill", fill_value=2, wrap_negative_indices=False))
    gone = held & (left < 2) & (marks.at[block].get(mode="fill", fill_value=0, wrap_negative_indices=False) == turn)
    known = gone & (left == 1)
    fronts, backs = running_sum(gone & ~known), running_sum(known)
    head, tail = state.counters[StepCounter.HEAD], state.counters[StepCounter.TAIL]
    places = state.queue.shape[0]
    place = jnp.where(known, tail + backs - 1, head - fronts[-1] + fronts - 1) & (places - 1)
    queue = state.queue.at[jnp.where(gone, place, places)].set(block, **DROP)
    counters = state.counters.at[StepCounter.HEAD].add(-fronts[-1]).at[StepCounter.TAIL].add(backs[-1])
    return replace(state, queue=queue, refs=refs, marks=marks, counters=counters)

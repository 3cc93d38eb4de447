"""Blocks that a step gives back and hands out: the free queue, references and rows, all lanes at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from hkv.cache.spans import count_up, cut, running_sum
from hkv.cache.state import StepCounter, StepState, replace
from hkv.cache.varying import marked, varying_axes


class Queue(NamedTuple):
    """Blocks that may be handed out, int32[] each: free blocks, those the step has room for, and the watermark."""

    free: jax.Array
    limit: jax.Array
    watermark: jax.Array


def read_once(enabled: jax.Array, read: Callable[[], jax.Array]) -> jax.Array:
    """Value that `read` gathers from an array that is written next; zeros where there is nothing to do.

    A gather alone is repeated by XLA wherever its result is used. Some of those places may come after the write, and
    then the whole array is copied. A conditional is performed once.
    """
    empty = jax.eval_shape(read)
    zeros = jnp.zeros(empty.shape, empty.dtype)
    return lax.cond(enabled, read, lambda: marked(zeros, varying_axes(enabled)))


def give_back(
    state: StepState, lines: jax.Array, first: jax.Array, end: jax.Array, room: int
) -> tuple[StepState, jax.Array, jax.Array]:
    """Takes a reference from the blocks of entries `[first, end)`, span after span, each from its last entry on.

    The entries become null. Blocks left without reference become free: those without keys go to the head of the queue,
    a later span's before an earlier one's; those with keys to its tail (vLLM 0.33 `BlockPool.free_blocks`).

    Args:
      state: the cache.
      lines: int32[K], the row of each line.
      first: int32[K, G].
      end: int32[K, G], not below `first`.
      room: lanes; where it is short, the first entries of the first spans are given back.

    Returns:
      The state; first entries not given back, int32[K, G]; and how many blocks wait, int32[].
    """
    due = end - first
    spans = cut(due, room)
    counts, line, group = spans.counts, spans.line, spans.group
    row = lines[line]
    column = first[line, group] + counts[line, group] - 1 - spans.within
    some = spans.ends[-1] > 0
    block = read_once(some, lambda: state.rows[row, group, column])
    held = spans.live & (block != 0)
    block = jnp.where(held, block, state.refs.shape[0])
    turn = count_up(room) + 1
    refs = state.refs.at[block].add(-2, mode="drop")
    marks = state.marks.at[block].set(0, mode="drop").at[block].max(turn, mode="drop")
    left = read_once(some, lambda: refs.at[block].get(mode="fill", fill_value=2))
    gone = held & (left < 2) & (marks.at[block].get(mode="fill", fill_value=0) == turn)
    known = gone & (left == 1)

    fronts = jnp.concatenate([jnp.zeros_like(turn, shape=1), running_sum(gone & ~known)])
    head, tail = state.counters[StepCounter.HEAD], state.counters[StepCounter.TAIL]
    span = line * first.shape[1] + group
    later = fronts[-1] - fronts[spans.ends[span]]
    front = head - fronts[-1] + later + fronts[:-1] - fronts[spans.starts[span]]
    backs = running_sum(known)
    size = state.queue.shape[0]
    place = jnp.where(known, tail + backs - 1, front) & (size - 1)
    queue = state.queue.at[jnp.where(gone, place, size)].set(block, mode="drop")
    nulled = jnp.where(held, column, state.rows.shape[2])
    rows = state.rows.at[row, group, nulled].set(0, mode="drop")
    counters = state.counters.at[StepCounter.HEAD].add(-fronts[-1]).at[StepCounter.TAIL].add(backs[-1])
    state = replace(state, queue=queue, refs=refs, marks=marks, rows=rows, counters=counters)
    return state, first + counts, jnp.sum(due - counts, dtype=jnp.int32)


def serve(
    taking: jax.Array, need: jax.Array, running: jax.Array, busy: jax.Array, queue: Queue
) -> tuple[jax.Array, jax.Array]:
    """Masks bool[Q] of the queries that are served, in order, and of those that too few blocks are free for.

    All are served unless blocks run short. Then the first one without room is refused, and all later ones that need
    more than is left; there are at most as many rounds as different needs. A row that runs already may take the
    watermark's blocks too, and so may any if no other row runs (vLLM 0.33 `KVCacheManager.allocate_slots`).
    """
    index = count_up(taking.shape[0])

    def refuse(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        served, refused, _, _ = carry
        place = jnp.argmax(refused).astype(jnp.int32)
        earlier = served & (index < place)
        before = jnp.sum(jnp.where(earlier, need, 0), dtype=jnp.int32)
        others = busy | jnp.any(earlier)
        _, beyond = _exceeds(need, before, others & ~running, queue)
        served = served & ~((index >= place) & beyond)
        lacks, beyond = _short(served, need, running, busy, queue)
        return served, served & beyond, lacks, jnp.any(served & beyond)

    # Where there are blocks for all, which is cheap to see, the loop makes no trip. Its first one may refuse nobody.
    total = jnp.sum(jnp.where(taking, need, 0), dtype=jnp.int32)
    scarce = total + queue.watermark > jnp.minimum(queue.free, queue.limit)
    nobody = jnp.zeros_like(taking)
    served, _, lacks, _ = lax.while_loop(lambda carry: carry[3], refuse, (taking, nobody, nobody, scarce))
    return served, lacks


def _short(
    served: jax.Array, need: jax.Array, running: jax.Array, busy: jax.Array, queue: Queue
) -> tuple[jax.Array, jax.Array]:
    """Masks bool[Q] of queries that find too few free blocks at their turn, and of those that find these or room short.

    Args:
      served: bool[Q], the queries that are served.
      need: int32[Q], blocks that each needs.
      running: bool[Q], whose rows run already.
      busy: bool[], whether any row of the cache runs.
      queue: what there is.
    """
    taken = jnp.where(served, need, 0)
    before = running_sum(taken) - taken
    others = busy | (running_sum(served) - served.astype(jnp.int32) > 0)
    return _exceeds(need, before, others & ~running, queue)


def _exceeds(need: jax.Array, before: jax.Array, kept: jax.Array, queue: Queue) -> tuple[jax.Array, jax.Array]:
    """Masks of `_short` when `before` blocks are taken already and rows in `kept` must leave the watermark free."""
    lacks = need + before + jnp.where(kept, queue.watermark, 0) > queue.free
    return lacks, lacks | (need + before > queue.limit)


def take(state: StepState, lines: jax.Array, length: jax.Array, need: jax.Array, room: int) -> StepState:
    """Hands out blocks for the last `need` entries of rows that will have `length` ones; their keys are dropped.

    Args:
      state: the cache.
      lines: int32[K], the row of each line.
      length: int32[K, G].
      need: int32[K, G].
      room: lanes, which suffice.
    """
    spans = cut(need, room)
    line, group = spans.line, spans.group
    column = length[line, group] - need[line, group] + spans.within
    head = state.counters[StepCounter.HEAD]
    block = state.queue[(head + count_up(room)) & (state.queue.shape[0] - 1)]
    block = jnp.where(spans.live, block, state.refs.shape[0])
    known = read_once(spans.ends[-1] > 0, lambda: state.refs.at[block].get(mode="fill", fill_value=0))
    evicted = jnp.sum(known, dtype=jnp.int32)
    counters = state.counters.at[StepCounter.HEAD].add(spans.ends[-1]).at[StepCounter.EVICTIONS].add(evicted)
    column = jnp.where(spans.live, column, state.rows.shape[2])
    return replace(
        state,
        refs=state.refs.at[jnp.where(known >= 0, block, 0)].set(2, mode="drop"),
        rows=state.rows.at[lines[line], group, column].set(block, mode="drop"),
        counters=counters,
    )


def move(
    state: StepState, lines: jax.Array, source: jax.Array, target: jax.Array, counts: jax.Array, room: int
) -> StepState:
    """Moves `counts` entries of rows from `source` to `target`, past their old places, which become null.

    Args:
      state: the cache.
      lines: int32[K], the row of each line.
      source: int32[K, G], the first of the entries.
      target: int32[K, G], its new place, behind the last of them.
      counts: int32[K, G].
      room: lanes, which suffice.
    """
    spans = cut(counts, room)
    line, group = spans.line, spans.group
    row, size = lines[line], state.rows.shape[2]
    old = jnp.where(spans.live, source[line, group] + spans.within, size)
    new = jnp.where(spans.live, target[line, group] + spans.within, size)
    block = read_once(spans.ends[-1] > 0, lambda: state.rows[row, group, jnp.minimum(old, size - 1)])
    # What was read says where to write: else XLA may read later, and copies all rows for that.
    rows = state.rows.at[row, group, jnp.where(block >= 0, old, size)].set(0, mode="drop")
    return replace(state, rows=rows.at[row, group, new].set(block, mode="drop"))

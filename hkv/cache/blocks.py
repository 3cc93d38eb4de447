"""Blocks that a step gives back and hands out: the free queue, references and rows, all lanes at once."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hkv.cache.queries import block_sizes, field, spread
from hkv.cache.spans import DROP, count_up, cut, of_queries, once, running_sum, token_queries
from hkv.cache.state import PAD, StepCounter, StepState, counted, replace
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.rules.parameters import GroupField
from hkv.state.loops import divide


class Queue(NamedTuple):
    """Blocks that may be handed out, int32[] each: free blocks, those the step has room for, and the watermark."""

    free: jax.Array
    limit: jax.Array
    watermark: jax.Array


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
    # Each span from its last entry on: the end of a sequence is evicted first (vLLM frees `reversed` rows).
    column = spans.of(first + counts - 1) - spans.within
    some = spans.used > 0
    block = once(some, lambda: state.rows[row, group, column])
    held = spans.live & (block != 0)
    block = jnp.where(held, block, state.refs.shape[0])
    turn = count_up(room) + 1
    # References count in twos (`StepState.refs`); a block in several rows is subtracted from once for each.
    refs = state.refs.at[block].add(-2, **DROP)
    # A block that several lanes give back becomes free with the last of them: of equal blocks, the highest turn
    # counts.
    marks = state.marks.at[block].set(0, **DROP).at[block].max(turn, **DROP)
    left = once(some, lambda: refs.at[block].get(mode="fill", fill_value=2, wrap_negative_indices=False))
    gone = held & (left < 2) & (marks.at[block].get(mode="fill", fill_value=0, wrap_negative_indices=False) == turn)
    known = gone & (left == 1)

    sums, backs = running_sum(jnp.stack([gone & ~known, known]))
    fronts = jnp.concatenate([jnp.zeros_like(turn, shape=1), sums])
    # The ring has room for every block once: head and tail are masked when they are used, not when they are counted.
    head, tail = state.counters[StepCounter.HEAD], state.counters[StepCounter.TAIL]
    # Blocks without keys go to the head span after span, a later span in front of an earlier one: how many come
    # before a block is how many later spans have.
    later = fronts[-1] - fronts[spans.ends]
    front = head - fronts[-1] + fronts[:-1] + spans.of(later - fronts[spans.starts])
    size = state.queue.shape[0]
    place = jnp.where(known, tail + backs - 1, front) & (size - 1)
    queue = state.queue.at[jnp.where(gone, place, size)].set(block, **DROP)
    nulled = jnp.where(held, column, state.rows.shape[2])
    rows = state.rows.at[row, group, nulled].set(0, **DROP)
    counters = counted(state.counters, {StepCounter.HEAD: -fronts[-1], StepCounter.TAIL: backs[-1]})
    state = replace(state, queue=queue, refs=refs, marks=marks, rows=rows, counters=counters)
    return state, first + counts, spans.left


def serve(
    taking: jax.Array, need: jax.Array, running: jax.Array, busy: jax.Array, queue: Queue
) -> tuple[jax.Array, jax.Array]:
    """Masks bool[Q] of the queries that are served, in order, and of those that too few blocks are free for.

    All are served unless blocks run short. Then the first one without room is refused, and all later ones that need
    more than is left; there are at most as many rounds as different needs. A row that runs already may take the
    watermark's blocks too, and so may any if no other row runs (vLLM 0.33 `KVCacheManager.allocate_slots`).
    """
    index, size = count_up(taking.shape[0]), taking.shape[0]

    def earliest(mask: jax.Array) -> jax.Array:
        """The first query of some, int32[]; the number of queries if none is."""
        return size - jnp.max(jnp.where(mask, size - index, 0))

    def refuse(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        served, _, first, place = carry
        before = jnp.sum(jnp.where(served & (index < place), need, 0), dtype=jnp.int32)
        _, beyond = _exceeds(need, before, (busy | (first < place)) & ~running, queue)
        served = served & ~((index >= place) & beyond)
        first, taken = earliest(served), jnp.where(served, need, 0)
        lacks, beyond = _exceeds(need, running_sum(taken) - taken, (busy | (first < index)) & ~running, queue)
        return served, lacks, first, earliest(served & beyond)

    # Where there are blocks for all, which is cheap to see, the loop makes no trip. Its first one may refuse no query.
    total = jnp.sum(jnp.where(taking, need, 0), dtype=jnp.int32)
    scarce = total + queue.watermark > jnp.minimum(queue.free, queue.limit)
    place = jnp.where(scarce, 0, size)
    carry = (taking, jnp.zeros_like(taking), jnp.zeros_like(place), place)
    served, lacks, _, _ = lax.while_loop(lambda carry: carry[3] < size, refuse, carry)
    return served, lacks


def _exceeds(need: jax.Array, before: jax.Array, kept: jax.Array, queue: Queue) -> tuple[jax.Array, jax.Array]:
    """Masks bool[Q] of queries that find too few free blocks, and of those that find these or room short.

    Args:
      need: int32[Q], blocks that each needs.
      before: int32[] or int32[Q], blocks that are taken already at its turn.
      kept: bool[Q], whether it must leave the watermark free.
      queue: what there is.
    """
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
    column = spans.of(length - need) + spans.within
    head = state.counters[StepCounter.HEAD]
    block = state.queue[(head + count_up(room)) & (state.queue.shape[0] - 1)]
    block = jnp.where(spans.live, block, state.refs.shape[0])
    # A registered block that is handed out loses its key here: the bit goes, and what stands in `keys` means nothing.
    known = once(
        spans.used > 0, lambda: state.refs.at[block].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    )
    evicted = jnp.sum(known, dtype=jnp.int32)
    counters = counted(state.counters, {StepCounter.HEAD: spans.used, StepCounter.EVICTIONS: evicted})
    column = jnp.where(spans.live, column, state.rows.shape[2])
    return replace(
        state,
        refs=state.refs.at[jnp.where(known >= 0, block, 0)].set(2, **DROP),
        rows=state.rows.at[lines[line], group, column].set(block, **DROP),
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
    old = jnp.where(spans.live, spans.of(source) + spans.within, size)
    new = jnp.where(spans.live, spans.of(target) + spans.within, size)
    block = once(spans.used > 0, lambda: state.rows[row, group, jnp.minimum(old, size - 1)])
    # What was read says where to write: else XLA may read later, and copies all rows for that.
    rows = state.rows.at[row, group, jnp.where(block >= 0, old, size)].set(0, **DROP)
    return replace(state, rows=rows.at[row, group, new].set(block, **DROP))


# Slots of a whole step: where its tokens go, on one rank, or on each of several that share a group's tokens.


def slots_of(
    groups: jax.Array,
    rows: jax.Array,
    lines: jax.Array,
    computed: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    size: int,
) -> tuple[jax.Array, jax.Array]:
    """Block and offset of every token of a ragged batch, int32[G, size] each; -1 for none.

    Args:
      groups: int32[G, 32], as in `hkv.dialects.vllm.rules.parameters.Parameters`.
      rows: int32[R, G, W], block ids.
      lines: int32[Q], the row of each query.
      computed: int32[Q], the position of its first token.
      starts: int32[Q], the place of its first token, ascending.
      lengths: int32[Q], its tokens; 0 for queries that are answered none.
      size: static; places.
    """
    query, _ = token_queries(jnp.append(starts, size), size)
    place = count_up(size)
    start, end, before, line = of_queries(query, starts, starts + lengths, computed - starts, lines)
    live = (place >= start) & (place < end)
    block_size = block_sizes(groups).T
    mapped = (groups[:, GroupField.ONE_BLOCK] == 0) & (groups[:, GroupField.BLOCK] > 0)
    position = jnp.broadcast_to((before + place)[None], (groups.shape[0], size))
    column = divide(position, block_size)
    inside = live[None] & mapped[:, None] & (column < rows.shape[2])
    block = rows[line[None], count_up(groups.shape[0])[:, None], jnp.where(inside, column, 0)]
    # No slot in a null block, nor behind the row's end: -1, which writes drop.
    good = inside & (block != 0)
    return jnp.where(good, block, PAD), jnp.where(good, position - column * block_size, PAD)


def state_blocks(
    groups: jax.Array, rows: jax.Array, lines: jax.Array, lengths: jax.Array, computed: jax.Array, counts: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Blocks of the states that queries read before `counts` tokens, and write after them.

    Args:
      groups: int32[G, 32], as in `hkv.dialects.vllm.rules.parameters.Parameters`.
      rows: int32[R, G, W], block ids after the step.
      lines: int32[Q], the row of each query.
      lengths: int32[Q, G], entries of the rows before the step: a block that came with it holds no state yet.
      computed: int32[Q], tokens before the step.
      counts: int32[Q], of the step; 0 for queries that compute nothing.

    Returns:
      int32[Q, G] twice. Read: the state after `computed` tokens; 0 for none: the state begins with zeros. Write:
      the state after `computed + counts` tokens; -1 for queries and groups that write none.
    """
    holds = (field(groups, GroupField.STATES) != 0) & (counts > 0)[:, None]
    single = field(groups, GroupField.ONE_BLOCK) != 0
    size, group = block_sizes(groups), count_up(groups.shape[0])[None]

    def block(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Columns of states after `tokens` int32[Q] tokens, and their blocks, int32[Q, G] each."""
        # The state after n tokens stands in the column of the n-th.
        column = jnp.where(single, 0, divide(spread(groups, tokens) - 1, size))
        return column, rows[lines[:, None], group, jnp.clip(column, 0, rows.shape[2] - 1)]

    column, read = block(computed)
    there = holds & (computed > 0)[:, None] & (column < lengths)
    _, written = block(computed + counts)
    return jnp.where(there, read, 0), jnp.where(holds & (written != 0), written, PAD)


def ranks_of(config: VllmConfig) -> np.ndarray:
    """Ranks that share each group's tokens under context parallelism, int32[G]; 1 for groups that every rank holds."""
    shared = [spec.shared_by_ranks for spec in config.topology.specs]
    return np.where(shared, config.context_parallel, 1).astype(np.int32)


def on_rank(
    blocks: jax.Array, offsets: jax.Array, ranks: jax.Array, rank: jax.Array, interleave: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The slots of a step that are one rank's, with offsets in its own part of the block (`slots.slot_mapping`).

    A block of a shared group holds the tokens of all ranks; they are dealt out, `interleave` at a time.

    Args:
      blocks: int32[G, N], of a `StepResult`.
      offsets: int32[G, N].
      ranks: int32[G], from `ranks_of`.
      rank: int32[].
      interleave: int32[], consecutive tokens that stay together; a divisor of every shared group's block on one rank.

    Returns:
      Blocks and offsets of the same shape, -1 for tokens of other ranks.
    """
    ranks = jnp.asarray(ranks)[:, None]
    deal = offsets // interleave
    own = (offsets >= 0) & ((ranks == 1) | (deal % ranks == rank))
    local = jnp.where(ranks == 1, offsets, deal // ranks * interleave + offsets % interleave)
    return jnp.where(own, blocks, PAD), jnp.where(own, local, PAD)

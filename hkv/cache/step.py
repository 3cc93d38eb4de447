"""A whole serving step at once, compiled: retire, allocate, address and register for every row of a batch.

The form for accelerators: no host round trip, no loop over rows, work in proportion to rows and new blocks. The rules
are vLLM 0.33's, those of `hkv.dialects.vllm.machine`; a step means: every row in order retires (`Code.RETIRE`), then
every row in order allocates (`Code.ALLOCATE`) and advances. As long as the step's room suffices it is exactly that,
block ids and the free queue's order included. vLLM itself lets a row allocate before the next one retires: as long as
nobody is refused, that gives the same rows up to renaming of blocks, and equal ones where nothing retires.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from hkv.cache.state import (
    PAD,
    StepBatch,
    StepCounter,
    StepRequest,
    StepResult,
    StepRow,
    StepState,
    init,
    known_rows,
    replace,
    room_for,
)
from hkv.cache.step_slots import slots_of, state_blocks
from hkv.cache.token_hashing import hash_tokens
from hkv.dialects.vllm.rules import reads
from hkv.dialects.vllm.rules.parameters import CacheField, GroupField, Parameters
from hkv.state.status import Status


class _Rows(NamedTuple):
    """Fields of `StepState.requests`: int32[R] and int32[R, G]."""

    live: jax.Array
    computed: jax.Array
    length: jax.Array
    first: jax.Array
    cached: jax.Array


class _Queue(NamedTuple):
    """Blocks that may be handed out, int32[] each: free blocks, those the step has room for, and the watermark."""

    free: jax.Array
    limit: jax.Array
    watermark: jax.Array


class _Spans(NamedTuple):
    """Spans of rows, one a row and group in that order, cut into one lane an entry.

    `starts` and `ends` int32[R * G]: lanes of each span. The others, one a lane: whether it is in use, its row, its
    group, and which entry of its span it is.
    """

    starts: jax.Array
    ends: jax.Array
    live: jax.Array
    row: jax.Array
    group: jax.Array
    within: jax.Array


def step(
    parameters: Parameters, state: StepState, batch: StepBatch, *, room: int, drafts: int = 0
) -> tuple[StepState, StepResult]:
    """One serving step of every row with tokens. A pure function, not jitted itself: `jitted` is.

    Rows are served in order. A row for whose new blocks too few are free takes nothing, and later ones that need fewer
    may still be served.

    Args:
      parameters: the configuration.
      state: the cache.
      batch: the new tokens.
      room: static; most blocks that the step gives back, that it hands out, and that it registers, each. `room_for`
        bounds what is needed. A row that does not fit is refused (`Status.STEP_FULL`); what cannot be given back or
        registered waits.
      drafts: static; slots beyond the tokens that are answered; at least the largest lookahead, to see them all.

    Returns:
      The new state, and the answers.
    """
    parameters, state, batch = jax.tree.map(jnp.asarray, (parameters, state, batch))
    rows = _fields(state)
    groups = parameters.groups[: state.rows.shape[1]]
    status, wanted, allowed = _check(parameters, state, rows, batch)
    taking = (status == int(Status.OK)) & (batch.counts > 0)
    longest = parameters.cache[CacheField.MAX_MODEL_LEN]
    processed = jnp.maximum(jnp.minimum(rows.computed, longest) - batch.in_flight, 0)
    begin = jnp.maximum(rows.first, groups[:, GroupField.SINKS])
    end = jnp.where(taking[:, None], jnp.minimum(_skipped(groups, processed), rows.length), begin)
    state, first, waiting = _give_back(state, begin, jnp.maximum(end, begin), room)
    rows = rows._replace(first=jnp.where(end > begin, first, rows.first))

    grown = jnp.maximum(wanted, rows.length)
    need = jnp.where(groups[:, GroupField.RECURRENT] != 0, jnp.minimum(grown - rows.length, 1), grown - rows.length)
    need = jnp.where(taking[:, None], need, 0)
    free = state.counters[StepCounter.TAIL] - state.counters[StepCounter.HEAD]
    queue = _Queue(free, jnp.minimum(free, room), parameters.cache[CacheField.WATERMARK])
    total, running = need.sum(axis=1), (rows.live != 0) & (rows.computed > 0)
    served = _serve(taking, total, running, queue)
    short, _ = _short(served, total, running, queue)
    refusal = jnp.where(short, int(Status.NO_ROOM), int(Status.STEP_FULL))
    status = jnp.where(taking & ~served, refusal, status)
    state = _take(state, grown, jnp.where(served[:, None], need, 0), room)
    had = rows.length
    rows = rows._replace(length=jnp.where(served[:, None], grown, rows.length))

    counts = jnp.where(served, batch.counts, 0)
    size = parameters.cache[CacheField.HASH_BLOCK]
    chains, hashing = hash_tokens(size, state.chains, state.hashing, rows.computed, batch.tokens, counts)
    state = replace(state, chains=chains, hashing=hashing)
    before, computed = rows.computed, rows.computed + counts
    state, cached, later = _register(parameters, state, rows, computed, served, room)
    rows = rows._replace(computed=computed, cached=cached)
    asked = jnp.where(served, batch.counts + jnp.maximum(batch.lookahead, 0), 0)
    blocks, offsets = slots_of(groups, state.rows, before, asked, batch.tokens.shape[1] + drafts)
    reads, writes = state_blocks(groups, state.rows, had, before, counts)
    answer = StepResult(status.astype(jnp.int32), allowed, blocks, offsets, reads, writes, jnp.stack([waiting, later]))
    return _with_fields(state, rows), answer


@functools.cache
def jitted(room: int, drafts: int = 0):
    """`step` compiled, its state donated: `jitted(room)(parameters, state, batch)`."""
    return jax.jit(functools.partial(step, room=room, drafts=drafts), donate_argnums=(1,))


@functools.partial(jax.jit, donate_argnums=0)
def start(state: StepState, rows: jax.Array, roots: jax.Array) -> tuple[StepState, jax.Array]:
    """Requests begin in empty rows, with no token computed.

    Args:
      state: donated.
      rows: int32[K], distinct rows; -1 for none.
      roots: uint32[K, 4], what stands for the key before a request's first: `hkv.keys.fingerprint.ROOT`, or other
        words, the same for requests that may share blocks (of one tenant, one LoRA).

    Returns:
      The state, and a status int32[K]: NO_SUCH_SLOT, or NOT_WAITING for a row that is not empty.
    """
    at, known = known_rows(state, rows)
    used = known & (state.requests[at, StepRequest.LIVE] != 0)
    done = known & ~used
    place = jnp.where(done, rows, state.requests.shape[0])
    line = jnp.zeros((rows.shape[0], state.requests.shape[1]), jnp.int32).at[:, StepRequest.LIVE].set(1)
    hashing = jnp.pad(roots.astype(jnp.uint32), ((0, 0), (0, state.hashing.shape[1] - 4)))
    status = jnp.where(known | (rows == PAD), int(Status.OK), int(Status.NO_SUCH_SLOT))
    requests = state.requests.at[place].set(line, mode="drop")
    hashing = state.hashing.at[place].set(hashing, mode="drop")
    return replace(state, requests=requests, hashing=hashing), jnp.where(used, int(Status.NOT_WAITING), status)


@functools.partial(jax.jit, donate_argnums=0)
def finish(state: StepState, rows: jax.Array) -> tuple[StepState, jax.Array]:
    """Requests end, one after the other, and give back all they hold, group by group, the last block first.

    Works on every entry of the rows: K * G * W lanes.

    Args:
      state: donated.
      rows: int32[K], distinct rows; -1 for none.

    Returns:
      The state, and a status int32[K]: NO_SUCH_SLOT for rows that have no request.
    """
    at, known = known_rows(state, rows)
    done = known & (state.requests[at, StepRequest.LIVE] != 0)
    fields = jax.tree.map(lambda field: field[at], _fields(state))
    size, groups, width = rows.shape[0], *state.rows.shape[1:]
    end = jnp.where(done[:, None], fields.length, 0)
    state, _, _ = _give_back(state, jnp.zeros_like(end), end, size * groups * width, at)
    place = jnp.where(done, rows, state.requests.shape[0])
    state = replace(state, requests=state.requests.at[place].set(0, mode="drop"))
    return state, jnp.where(done | (rows == PAD), int(Status.OK), int(Status.NO_SUCH_SLOT))


@jax.jit
def find(state: StepState, group: jax.Array, keys: jax.Array) -> jax.Array:
    """The blocks that a group has under keys, those registered first; 0 for none.

    Compares every key with every block: for a look at a prefix when a request arrives, not for every step.

    Args:
      state: the cache.
      group: int32[].
      keys: uint32[K, 4].

    Returns:
      int32[K].
    """
    same = jnp.all(keys[:, None, :] == state.keys[None, :, :4], axis=-1)
    same &= (state.keys[:, 4] == group.astype(jnp.uint32)) & (state.refs % 2 == 1)
    age = state.counters[StepCounter.REGISTERED].astype(jnp.uint32) - state.keys[:, 5]
    return jnp.argmax(jnp.where(same, age, 0), axis=1).astype(jnp.int32)


# What rows know.


def _fields(state: StepState) -> _Rows:
    front, groups = len(StepRequest), state.rows.shape[1]
    parts = [state.requests[:, front + int(f) * groups : front + (int(f) + 1) * groups] for f in StepRow]
    return _Rows(state.requests[:, StepRequest.LIVE], state.requests[:, StepRequest.COMPUTED], *parts)


def _with_fields(state: StepState, rows: _Rows) -> StepState:
    columns = (rows.live[:, None], rows.computed[:, None], rows.length, rows.first, rows.cached)
    return replace(state, requests=jnp.concatenate(columns, axis=1))


def _read(enabled: jax.Array, read: Callable[[], jax.Array]) -> jax.Array:
    """Value that `read` gathers from an array that is written next; zeros where there is nothing to do.

    A gather alone is repeated by XLA wherever its result is used. Some of those places may come after the write, and
    then the whole array is copied. A conditional is performed once.
    """
    empty = jax.eval_shape(read)
    return lax.cond(enabled, read, lambda: jnp.zeros(empty.shape, empty.dtype))


def _skipped(groups: jax.Array, tokens: jax.Array) -> jax.Array:
    """Whole blocks of each group that a row's query at `tokens` does not need, int32[R, G]."""
    shape = (tokens.shape[0], groups.shape[0])
    n = jnp.broadcast_to(tokens[:, None], shape)
    reach = jnp.broadcast_to(groups[:, GroupField.REACH], shape)
    unit = jnp.broadcast_to(groups[:, GroupField.UNIT], shape)
    return reads.skipped_tokens(n, unit, reach) // _blocks(groups)


def _blocks(groups: jax.Array) -> jax.Array:
    return jnp.maximum(groups[:, GroupField.BLOCK], 1)


def _check(
    parameters: Parameters, state: StepState, rows: _Rows, batch: StepBatch
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Statuses int32[R] of rows that ask for what cannot be, the length each row needs, int32[R, G], and the tokens of
    those asked for that each may compute, int32[R].
    """
    groups = parameters.groups[: state.rows.shape[1]]
    longest = parameters.cache[CacheField.MAX_MODEL_LEN]
    main = rows.computed + batch.counts
    slots = jnp.minimum(main + batch.lookahead, longest)
    tokens = jnp.where(groups[:, GroupField.RECURRENT] != 0, main[:, None], slots[:, None])
    wanted = jnp.where(groups[:, GroupField.ONE_BLOCK] != 0, 1, -(-tokens // _blocks(groups)))
    wanted = jnp.where(jnp.arange(groups.shape[0]) < parameters.cache[CacheField.GROUPS], wanted, 0)
    hashes = main // jnp.maximum(parameters.cache[CacheField.HASH_BLOCK], 1)
    full = (main > longest) | jnp.any(wanted > state.rows.shape[2], axis=1) | (hashes > state.chains.shape[1])
    outside = (
        (batch.counts < 0) | (batch.counts > batch.tokens.shape[1]) | (batch.lookahead < 0) | (batch.in_flight < 0)
    )
    asked = (batch.counts != 0) & (rows.live == 0)
    allowed = jnp.minimum(jnp.maximum(batch.counts, 0), before_states(groups, rows.computed))
    status = jnp.where(batch.counts > allowed, int(Status.CROSSES_STATE), int(Status.OK))
    status = jnp.where(full & (batch.counts > 0), int(Status.ROW_FULL), status)
    status = jnp.where(asked, int(Status.NOT_RUNNING), status)
    status = jnp.where(outside, int(Status.OUT_OF_RANGE), status)
    return status, wanted, jnp.where(rows.live != 0, allowed, 0)


def before_states(groups: jax.Array, computed: jax.Array) -> jax.Array:
    """Tokens up to the end of the first recurrent group's block that a row with `computed` int32[R] tokens is inside.

    A chunk that went on behind it would leave no state there, while the block is registered as the one that holds it.
    vLLM 0.33's scheduler ends chunks there (`Scheduler._mamba_block_aligned_split`).

    Returns:
      int32[R]; `reads.UNLIMITED` for rows that are inside none.
    """
    inside = computed[:, None] % _blocks(groups)
    kept = (groups[:, GroupField.RECURRENT] != 0) & (groups[:, GroupField.CACHEABLE] != 0)
    rest = jnp.where(kept & (inside > 0), _blocks(groups) - inside, reads.UNLIMITED)
    return jnp.min(rest, axis=1, initial=reads.UNLIMITED)


# Spans of rows.


def _cut(counts: jax.Array, room: int) -> _Spans:
    """Cuts spans of `counts` entries, int32[R, G], all within `room` lanes, into lanes."""
    flat = counts.reshape(-1)
    ends = jnp.cumsum(flat)
    starts = ends - flat
    marks = jnp.zeros(room, jnp.int32).at[starts].add(1, mode="drop")
    span = jnp.cumsum(marks) - 1
    lane = jnp.arange(room)
    groups = counts.shape[1]
    return _Spans(starts, ends, lane < ends[-1], span // groups, span % groups, lane - starts[span])


def _clip(counts: jax.Array, room: int) -> jax.Array:
    """Part of the spans, in order, for which there is room."""
    flat = counts.reshape(-1)
    before = jnp.cumsum(flat) - flat
    return jnp.clip(room - before, 0, flat).reshape(counts.shape)


def _give_back(
    state: StepState, first: jax.Array, end: jax.Array, room: int, at: jax.Array | None = None
) -> tuple[StepState, jax.Array, jax.Array]:
    """Takes a reference from the blocks of entries `[first, end)`, span after span, each from its last entry on.

    The entries become null. Blocks left without reference become free: those without keys go to the head of the queue,
    a later span's before an earlier one's; those with keys to its tail (vLLM 0.33 `BlockPool.free_blocks`).

    Args:
      state: the cache.
      first: int32[K, G].
      end: int32[K, G], not below `first`.
      room: lanes; where it is short, the first entries of the first spans are given back.
      at: int32[K], the row of each line; line i is row i by default.

    Returns:
      The state; first entries not given back, int32[K, G]; and how many blocks wait, int32[].
    """
    due = end - first
    counts = _clip(due, room)
    spans = _cut(counts, room)
    line, group = spans.row, spans.group
    row = line if at is None else at[line]
    column = first[line, group] + counts[line, group] - 1 - spans.within
    some = spans.ends[-1] > 0
    block = _read(some, lambda: state.rows[row, group, column])
    held = spans.live & (block != 0)
    block = jnp.where(held, block, state.refs.shape[0])
    turn = jnp.arange(1, room + 1)
    refs = state.refs.at[block].add(-2, mode="drop")
    marks = state.marks.at[block].set(0, mode="drop").at[block].max(turn, mode="drop")
    left = _read(some, lambda: refs.at[block].get(mode="fill", fill_value=2))
    gone = held & (left < 2) & (marks.at[block].get(mode="fill", fill_value=0) == turn)
    known = gone & (left == 1)

    fronts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(gone & ~known, dtype=jnp.int32)])
    head, tail = state.counters[StepCounter.HEAD], state.counters[StepCounter.TAIL]
    span = line * first.shape[1] + group
    later = fronts[-1] - fronts[spans.ends[span]]
    front = head - fronts[-1] + later + fronts[:-1] - fronts[spans.starts[span]]
    backs = jnp.cumsum(known, dtype=jnp.int32)
    size = state.queue.shape[0]
    place = jnp.where(known, tail + backs - 1, front) & (size - 1)
    queue = state.queue.at[jnp.where(gone, place, size)].set(block, mode="drop")
    nulled = jnp.where(held, column, state.rows.shape[2])
    rows = state.rows.at[row, group, nulled].set(0, mode="drop")
    counters = state.counters.at[StepCounter.HEAD].add(-fronts[-1]).at[StepCounter.TAIL].add(backs[-1])
    state = replace(state, queue=queue, refs=refs, marks=marks, rows=rows, counters=counters)
    return state, first + counts, jnp.sum(due - counts)


def _short(served: jax.Array, need: jax.Array, running: jax.Array, queue: _Queue) -> tuple[jax.Array, jax.Array]:
    """Masks bool[R] of rows that find too few free blocks at their turn, and of those that find these or room short."""
    before = jnp.cumsum(jnp.where(served, need, 0)) - jnp.where(served, need, 0)
    others = jnp.any(running) | (jnp.cumsum(served) - served > 0)
    return _exceeds(need, before, others & ~running, queue)


def _exceeds(need: jax.Array, before: jax.Array, kept: jax.Array, queue: _Queue) -> tuple[jax.Array, jax.Array]:
    """Masks of `_short` when `before` blocks are taken already and rows in `kept` must leave the watermark free."""
    short = need + before + jnp.where(kept, queue.watermark, 0) > queue.free
    return short, short | (need + before > queue.limit)


def _serve(taking: jax.Array, need: jax.Array, running: jax.Array, queue: _Queue) -> jax.Array:
    """Mask bool[R] of the rows that are served, in order.

    All rows are served unless blocks run short. Then the first row without room is refused, and all later rows that
    need more than is left; there are at most as many rounds as different needs. A row that runs already may take the
    watermark's blocks too, and so may any if no other row runs (vLLM 0.33 `KVCacheManager.allocate_slots`).
    """
    index = jnp.arange(taking.shape[0])

    def refused(served: jax.Array) -> jax.Array:
        return served & _short(served, need, running, queue)[1]

    def refuse(served: jax.Array) -> jax.Array:
        place = jnp.argmax(refused(served))
        earlier = served & (index < place)
        before = jnp.sum(jnp.where(earlier, need, 0))
        others = jnp.any(running) | jnp.any(earlier)
        _, beyond = _exceeds(need, before, others & ~running, queue)
        return served & ~((index >= place) & beyond)

    return lax.while_loop(lambda served: jnp.any(refused(served)), refuse, taking)


def _take(state: StepState, length: jax.Array, need: jax.Array, room: int) -> StepState:
    """Hands out blocks for the last `need` entries of rows that will have `length` ones; their keys are dropped."""
    spans = _cut(need, room)
    row, group = spans.row, spans.group
    column = length[row, group] - need[row, group] + spans.within
    head = state.counters[StepCounter.HEAD]
    block = state.queue[(head + jnp.arange(room)) & (state.queue.shape[0] - 1)]
    block = jnp.where(spans.live, block, state.refs.shape[0])
    known = _read(spans.ends[-1] > 0, lambda: state.refs.at[block].get(mode="fill", fill_value=0))
    evicted = jnp.sum(known, dtype=jnp.int32)
    counters = state.counters.at[StepCounter.HEAD].add(spans.ends[-1]).at[StepCounter.EVICTIONS].add(evicted)
    return replace(
        state,
        refs=state.refs.at[jnp.where(known >= 0, block, 0)].set(2, mode="drop"),
        rows=state.rows.at[row, group, jnp.where(spans.live, column, state.rows.shape[2])].set(block, mode="drop"),
        counters=counters,
    )


# Keys.


def _cacheable(parameters: Parameters, groups: jax.Array, tokens: jax.Array) -> jax.Array:
    """Tokens of each group that may be registered, int32[R, G]: `hkv.dialects.vllm.rules.register.cacheable_tokens`."""
    cache = parameters.cache
    tokens = tokens[:, None]
    certain = jnp.maximum(tokens - cache[CacheField.REPREFILLABLE], 0)
    alignment = jnp.maximum(cache[CacheField.ALIGNMENT], 1)
    aligned = tokens - tokens % alignment
    more = jnp.minimum(certain, certain - certain % alignment + _blocks(groups))
    hybrid = jnp.where((groups[:, GroupField.EAGLE] != 0) & (aligned > 0), more, aligned)
    found = jnp.where(cache[CacheField.UNITARY] != 0, certain, hybrid)
    return jnp.where((groups[:, GroupField.CACHEABLE] != 0) & (cache[CacheField.CACHING] != 0), found, 0)


def _register(
    parameters: Parameters, state: StepState, rows: _Rows, tokens: jax.Array, served: jax.Array, room: int
) -> tuple[StepState, jax.Array, jax.Array]:
    """Registers the blocks that served rows' first `tokens` tokens fill, but null ones and those retention leaves out.

    Returns:
      The state; entries looked at, int32[R, G]; and how many wait, int32[].
    """
    groups = parameters.groups[: state.rows.shape[1]]
    full = _cacheable(parameters, groups, tokens) // _blocks(groups)
    due = jnp.where(served[:, None], jnp.maximum(full - rows.cached, 0), 0)
    counts = _clip(due, room)
    spans = _cut(counts, room)
    row, group = spans.row, spans.group
    column = rows.cached[row, group] + spans.within
    block = state.rows[row, group, column]
    scale = jnp.maximum(groups[group, GroupField.SCALE], 1)
    key = state.chains[row, (column + 1) * scale - 1]
    period, shift = groups[group, GroupField.PERIOD], groups[group, GroupField.SHIFT]
    phase = jnp.maximum(column - shift, 0) % jnp.maximum(period, 1)
    kept = (period == 0) | ((column >= shift) & (phase >= period - groups[group, GroupField.KEEP]))
    kept &= spans.live & (block != 0)
    refs = _read(spans.ends[-1] > 0, lambda: state.refs[block])
    kept &= (refs & 1) == 0
    order = jnp.cumsum(kept, dtype=jnp.int32)
    stamp = (state.counters[StepCounter.REGISTERED] + order - 1).astype(jnp.uint32)
    words = jnp.concatenate([key, group.astype(jnp.uint32)[:, None], stamp[:, None]], axis=1)
    place = jnp.where(kept, block, state.refs.shape[0])
    keys = state.keys.at[place].set(words, mode="drop")
    counters = state.counters.at[StepCounter.REGISTERED].add(order[-1])
    state = replace(state, refs=state.refs.at[place].set(refs | 1, mode="drop"), keys=keys, counters=counters)
    return state, rows.cached + counts, jnp.sum(due - counts)


__all__ = ["find", "finish", "init", "jitted", "room_for", "start", "step"]

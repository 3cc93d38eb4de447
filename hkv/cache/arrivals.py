"""Requests that arrive between whole steps: their prompts are hashed, looked up and adopted, all inside `jit`.

`arrive` serves K requests at once. It may stand in the same compiled loop as `hkv.cache.step.step`. It takes time of
the prompts, of what was registered since requests arrived last (`hkv.cache.key_index`), and, where hits take free
blocks out of the middle of the queue, of what was given back since those. There is no loop over requests.

The hit is the longest length at which every group can resume, by its definition (`docs/hits.md`). Without EAGLE, and
with chunks that are multiples of the block, that is what vLLM 0.33 finds; where it finds another length, it is for one
of the causes that page names.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hkv.cache import inside_hits
from hkv.cache.key_index import LANES, bring_up_to_date
from hkv.cache.key_index import look_up as look_up_keys
from hkv.cache.queries import Rows, field, known_rows, lines
from hkv.cache.spans import DROP, count_up, holder, inside, leaves_states, running_sum, unified
from hkv.cache.state import HASH_WORDS, PAD, StepCounter, StepRequest, StepState, replace
from hkv.cache.token_hashing import hash_prompts, keyed, last_tokens, lookahead, prompt_keys
from hkv.dialects.vllm.rules import reads
from hkv.dialects.vllm.rules.parameters import READ_FIELDS, CacheField, GroupField, Parameters
from hkv.machine.native_regions import Dispatched
from hkv.pytrees import pytree
from hkv.state.loops import divide, remainder
from hkv.state.status import Status

COLUMNS = 32
"""Entries of a row that are looked up side by side."""


@pytree()
@dataclasses.dataclass(frozen=True)
class Arrivals:
    """Requests that arrive. K is how many, P the most tokens of one.

    Attributes:
      rows: int32[K], the rows they take, all different and empty; -1 for none.
      roots: uint32[K, 4], as in `hkv.cache.step.start`.
      tokens: int32[K, P], their tokens.
      counts: int32[K], how many; 0 for a request that begins with nothing.
      prompts: int32[K], how many of them, or more, are the prompt, before whose end sparse retention keeps blocks: a
        request that was preempted comes with what it generated. None where all are.
    """

    rows: jax.Array
    roots: jax.Array
    tokens: jax.Array
    counts: jax.Array
    prompts: jax.Array | None = None


@pytree()
@dataclasses.dataclass(frozen=True)
class ArrivalResult:
    """Result of `arrive`. Lengths are in tokens.

    Attributes:
      status: int32[K]; all but OK took nothing.
      hits: int32[K], cached tokens found and adopted: a multiple of the scheduler's block (of the only group's; of a
        hash block where hits end inside blocks), and less than the request has.
      alone: int32[K, G], the longest hit of each group by itself; `hits` is their common length.
    """

    status: jax.Array
    hits: jax.Array
    alone: jax.Array


class Lookup(NamedTuple):
    """Cached prefixes of K prompts.

    `hits` int32[K], `alone` int32[K, G], and `blocks` int32[K, G, W], 0 for none. `shared_prefix` int32[K]: the longest
    hit of the groups that are looked up first, if that is longer, else 0 (vLLM 0.33 `find_longest_cache_hit`).
    """

    hits: jax.Array
    shared_prefix: jax.Array
    alone: jax.Array
    blocks: jax.Array


def arrive(parameters: Parameters, state: StepState, arrivals: Arrivals) -> tuple[StepState, ArrivalResult]:
    """Requests begin in empty rows with the longest prefix that the cache has. A pure function, not jitted itself.

    It means: every request in order is looked up, and adopts its hit without any further block
    (`hkv.dialects.vllm.rules.operations.Code.LOOKUP`, then `ALLOCATE`). Nothing is evicted by that, so that the order
    does not show.

    Args:
      parameters: the configuration.
      state: the cache.
      arrivals: the requests. None is registered before `step` has been told to compute it, so that requests which
        arrive together find nothing of each other.

    Returns:
      The state, and the answers. Statuses: NO_SUCH_SLOT for a row that does not exist or was named before, NOT_WAITING
      for one that is not empty, OUT_OF_RANGE for a count outside the prompt, ROW_FULL for more tokens than a row, its
      chain or the model has room for.
    """
    parameters, state, arrivals = unified(parameters, state, arrivals)
    status, taken = _check(parameters, state, arrivals)
    counts = jnp.where(taken, arrivals.counts, 0)
    roots = arrivals.roots.astype(jnp.uint32)
    size = parameters.cache[CacheField.HASH_BLOCK]
    state, chains, found = look_up(parameters, state, roots, arrivals.tokens, counts)
    ahead, links = lookahead(state), chains
    if ahead:
        links = prefix_links(parameters, state, roots, arrivals.tokens, counts)
        known = count_up(chains.shape[1])[None] < keyed(state, found.hits, jnp.maximum(size, 1))[:, None]
        chains = jnp.where(known[:, :, None], chains, links)

    place = jnp.where(taken, arrivals.rows, state.requests.shape[0])
    hashed = divide(found.hits, jnp.maximum(size, 1))
    last = jnp.take_along_axis(links, jnp.maximum(hashed - 1, 0)[:, None, None], axis=1)[:, 0]
    key = jnp.where((hashed > 0)[:, None], last, roots)
    hashing = jnp.pad(key, ((0, 0), (0, state.hashing.shape[1] - 4)))
    if ahead:
        hashing = hashing.at[:, HASH_WORDS:].set(last_tokens(arrivals.tokens, found.hits, ahead))
    state = replace(
        state,
        rows=state.rows.at[place].set(found.blocks, **DROP),
        requests=state.requests.at[place].set(_lines(parameters, state, arrivals, found), **DROP),
        chains=state.chains.at[place].set(chains, **DROP),
        hashing=state.hashing.at[place].set(hashing, **DROP),
    )
    # Read back, since they would be found anew for each use.
    state = hold(state, state.rows.at[place].get(mode="fill", fill_value=0, wrap_negative_indices=False))
    alone = jnp.where(taken[:, None], found.alone, 0)
    return state, ArrivalResult(status, jnp.where(taken, found.hits, 0), alone)


jitted = jax.jit(arrive, donate_argnums=1)
"""`arrive` compiled, its state donated."""


def specialised(parameters: Parameters):
    """`arrive` compiled for one configuration, its state donated: `specialised(parameters)(state, arrivals)`.

    As `hkv.cache.step.specialised`.
    """
    constants = jax.tree.map(np.asarray, parameters)
    return Dispatched(lambda state, arrivals: arrive(constants, state, arrivals))


def _check(parameters: Parameters, state: StepState, arrivals: Arrivals) -> tuple[jax.Array, jax.Array]:
    """Statuses int32[K], and which requests begin, bool[K]."""
    rows, counts = arrivals.rows, arrivals.counts
    at, known = known_rows(state, rows)
    used = known & (state.requests[at, StepRequest.LIVE] != 0)
    groups = parameters.groups[: state.rows.shape[1]]
    cached = groups[:, GroupField.CACHEABLE] != 0
    columns = jnp.where(cached[None], divide(jnp.maximum(counts, 0)[:, None], _blocks(groups)[None]), 0)
    size = jnp.maximum(parameters.cache[CacheField.HASH_BLOCK], 1)
    full = jnp.any(columns > state.rows.shape[2], axis=1) | (
        divide(jnp.maximum(counts, 0), size) > state.chains.shape[1]
    )
    full |= counts > parameters.cache[CacheField.MAX_MODEL_LEN]
    outside = (counts < 0) | (counts > arrivals.tokens.shape[1])
    status = jnp.where(full, int(Status.ROW_FULL), int(Status.OK))
    status = jnp.where(outside, int(Status.OUT_OF_RANGE), status)
    status = jnp.where(used, int(Status.NOT_WAITING), status)
    status = jnp.where(known, status, int(Status.NO_SUCH_SLOT))
    taken = status == int(Status.OK)
    return jnp.where(rows == PAD, int(Status.OK), status).astype(jnp.int32), taken


def _lines(parameters: Parameters, state: StepState, arrivals: Arrivals, found: Lookup) -> jax.Array:
    """The new lines of `requests`: what was adopted is computed, and registered already."""
    groups = parameters.groups[: state.rows.shape[1]]
    cacheable = field(groups, GroupField.CACHEABLE) != 0
    whole = divide(found.hits[:, None], _blocks(groups)[None])
    partial = None
    if inside(state):
        partial = jnp.where(cacheable & (remainder(found.hits[:, None], _blocks(groups)[None]) != 0), whole + 1, 0)
        whole = jnp.maximum(whole, partial)
    length = jnp.where(cacheable, whole, 0)
    column = count_up(found.blocks.shape[2])[None, None] + 1
    null = (found.blocks == 0) & (column <= length[:, :, None])
    first = jnp.max(jnp.where(null, column, 0), axis=2)
    prompts = arrivals.counts if arrivals.prompts is None else jnp.maximum(arrivals.prompts, 0).astype(jnp.int32)
    live = jnp.ones_like(found.hits)
    front = len(StepRequest) + 3 * groups.shape[0]
    grown = jnp.zeros_like(length) if state.requests.shape[1] > front else None
    cached = length if partial is None else length - (partial > 0)
    rows = Rows(live, found.hits, prompts, found.shared_prefix, length, first, cached, grown, partial)
    if leaves_states(state):
        none = jnp.zeros_like(length)
        came = arrivals.counts.astype(jnp.int32) - 1
        came = jnp.where(came > prompts, came, 0)
        rows = rows._replace(export=none, export_entry=none, prefill=none + came[:, None])
    return lines(rows)


def _blocks(groups: jax.Array) -> jax.Array:
    return jnp.maximum(groups[:, GroupField.BLOCK], 1)


# Looking up.


def look_up(
    parameters: Parameters, state: StepState, roots: jax.Array, tokens: jax.Array, counts: jax.Array
) -> tuple[StepState, jax.Array, Lookup]:
    """The keys of prompts, and their longest hits.

    Args:
      parameters: the configuration.
      state: the cache.
      roots: uint32[K, 4].
      tokens: int32[K, P].
      counts: int32[K].

    Returns:
      The state with its index up to date, the key of each whole hash block, uint32[K, C, 4], and what is found.
    """
    chains = prefix_keys(parameters, state, roots, tokens, counts)
    state = bring_up_to_date(state)
    search = _look_up_inside if inside(state) else _look_up
    return state, chains, search(parameters, state, chains, counts)


def prefix_keys(
    parameters: Parameters, state: StepState, roots: jax.Array, tokens: jax.Array, counts: jax.Array
) -> jax.Array:
    """The key of each whole hash block of prompts, uint32[K, C, 4]; arguments as of `look_up`."""
    links, ahead = prefix_links(parameters, state, roots, tokens, counts), lookahead(state)
    size = jnp.maximum(parameters.cache[CacheField.HASH_BLOCK], 1)
    return prompt_keys(links, tokens, size, ahead) if ahead else links


def prefix_links(
    parameters: Parameters, state: StepState, roots: jax.Array, tokens: jax.Array, counts: jax.Array
) -> jax.Array:
    """The link of each whole hash block in the chain of its prompt, uint32[K, C, 4]; arguments as of `look_up`."""
    size = jnp.maximum(parameters.cache[CacheField.HASH_BLOCK], 1)
    return hash_prompts(size, roots, tokens, counts, state.chains.shape[1])


def _look_up(parameters: Parameters, state: StepState, chains: jax.Array, counts: jax.Array) -> Lookup:
    """The longest hits of prompts with the keys `chains` uint32[K, C, 4] and `counts` tokens."""
    groups = parameters.groups[: state.rows.shape[1]]
    size = jnp.maximum(parameters.cache[CacheField.HASH_BLOCK], 1)
    linked = jnp.where(parameters.cache[CacheField.CACHING] != 0, divide(counts, size), 0)
    # A length behind the last key is found where nothing is read that would have to be found by a key.
    hashed = jnp.minimum(linked, keyed(state, counts, size)) if lookahead(state) else linked
    column, scale = count_up(state.rows.shape[2]), jnp.maximum(groups[:, GroupField.SCALE], 1)
    whole = jnp.where((groups[:, GroupField.CACHEABLE] != 0)[None], divide(hashed[:, None], scale[None]), 0)
    held = _registered(state, chains, (column[None] + 1) * scale[:, None] - 1, whole)

    lengths = count_up(chains.shape[1] + 1) * size
    begin, end, proof = _spans(groups, lengths)
    missing = jnp.pad(running_sum(held == 0), ((0, 0), (0, 0), (1, 0)))
    width, sinks = held.shape[2], groups[:, GroupField.SINKS, None]
    # Entries before some columns that no block was found for, those past the row's end too.
    columns = jnp.stack([begin, end + proof, jnp.minimum(end, sinks)])
    group = count_up(groups.shape[0])[None, :, None]
    found = missing.at[:, group, jnp.minimum(columns, width)].get(mode="clip", wrap_negative_indices=False)
    missed = found + jnp.maximum(columns - width, 0)[None]

    readable = (missed[:, 1] == missed[:, 0]) & (missed[:, 2] == 0)
    readable |= ((groups[:, GroupField.CACHEABLE] == 0)[:, None] | (lengths == 0)[None])[None]
    aligned = remainder(lengths, jnp.maximum(parameters.cache[CacheField.ALIGNMENT], 1)) == 0
    below = (lengths[None] < counts[:, None]) & (lengths[None] <= linked[:, None] * size) & aligned[None]
    # Groups that are looked up first, all groups, and each group by itself, whose lengths are found at once.
    together = groups[:, GroupField.COLUMN] < groups[0, GroupField.FINDER_COUNT]
    asked = jnp.concatenate([together[None], jnp.ones_like(together)[None], jnp.eye(together.shape[0], dtype=bool)])
    able = jnp.all(readable[:, None] | ~asked[None, :, :, None], axis=2) & below[:, None]
    longest = jnp.max(jnp.where(able, lengths[None, None], 0), axis=2)
    longest, hits, alone = longest[:, 0], longest[:, 1], longest[:, 2:]
    begin, end, _ = _spans(groups, hits)
    place = column[None, None]
    inside = ((place >= begin.T[:, :, None]) | (place < sinks[None])) & (place < end.T[:, :, None])
    return Lookup(hits, jnp.where(longest > hits, longest, 0), alone, jnp.where(inside, held, 0))


def _look_up_inside(parameters: Parameters, state: StepState, chains: jax.Array, counts: jax.Array) -> Lookup:
    """`_look_up` where hits may end inside blocks: every group is asked for every hash block."""
    groups = parameters.groups[: state.rows.shape[1]]
    size = jnp.maximum(parameters.cache[CacheField.HASH_BLOCK], 1)
    hashed = jnp.where(parameters.cache[CacheField.CACHING] != 0, divide(counts, size), 0)
    units = jnp.where((groups[:, GroupField.CACHEABLE] != 0)[None], hashed[:, None], 0)
    every = jnp.broadcast_to(count_up(chains.shape[1])[None], (groups.shape[0], chains.shape[1]))
    held = _registered(state, chains, every, units)
    begin, _, proof = _spans(groups, count_up(chains.shape[1] + 1) * size)
    return Lookup(
        *inside_hits.longest(parameters, groups, holder(state, held), begin, proof, counts, state.rows.shape[2])
    )


def _registered(state: StepState, chains: jax.Array, key: jax.Array, columns: jax.Array) -> jax.Array:
    """The entries under the keys `chains[:, key]`, int32[K, G, W], in the first `columns` int32[K, G] of each group.

    Columns are looked up some at a time, up to the last that is asked for.
    """
    (groups, width), requests = key.shape, columns.shape[0]
    size, last = min(COLUMNS, width), jnp.minimum(jnp.max(columns), width)
    group = jnp.broadcast_to(count_up(groups)[None, :, None], (requests, groups, size))
    key = jnp.minimum(key, chains.shape[1] - 1)

    def some(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first, found = carry
        first = jnp.minimum(first, width - size)
        keys = chains[:, lax.dynamic_slice_in_dim(key, first, size, 1)]
        wanted = (first + count_up(size))[None, None] < columns[:, :, None]
        blocks = look_up_keys(state, group.reshape(-1), keys.reshape(-1, 4), wanted.reshape(-1))
        return first + size, lax.dynamic_update_slice_in_dim(found, blocks.reshape(wanted.shape), first, 2)

    carry = jnp.zeros_like(last), jnp.zeros_like(last, shape=(requests, groups, width))
    return lax.while_loop(lambda carry: carry[0] < last, some, carry)[1]


def _spans(groups: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The blocks that each group must have to resume at some lengths int32[n], besides those of sinks: first, end, and
    how many after those.

    Returns:
      int32[G, n] three times; the last one is 1 for EAGLE groups, which prove by it what they are given.
    """
    shape = (groups.shape[0], lengths.shape[0])
    unit, lookback, halvings = (jnp.broadcast_to(groups[:, each, None], shape) for each in READ_FIELDS)
    tokens = jnp.broadcast_to(lengths[None], shape)
    end = divide(tokens, _blocks(groups)[:, None])
    begin = divide(reads.skipped_tokens(tokens, unit, lookback, halvings), _blocks(groups)[:, None])
    run = jnp.maximum(groups[:, GroupField.NEED, None], 0)
    run_alone = (groups[:, GroupField.BACKWARD, None] != 0) & (unit <= 1) & (halvings == 0)
    begin = jnp.where(run_alone, jnp.maximum(end - run, 0), begin)
    proof = (groups[:, GroupField.EAGLE, None] != 0) & (groups[:, GroupField.RECURRENT, None] == 0)
    proof = jnp.broadcast_to(proof, shape)
    return jnp.minimum(begin, end), end, proof.astype(jnp.int32)


# Adopting.


def hold(state: StepState, blocks: jax.Array) -> StepState:
    """References to blocks, as often as they are named; those that were free leave the queue, the rest closes up.

    Takes time of what was given back since the earliest of them.
    """
    named = blocks.reshape(-1)
    turn = count_up(named.shape[0]) + 1
    before, size = state.refs[named], state.refs.shape[0]
    free = jnp.where((named > 0) & (before < 2), named, size)
    marks = state.marks.at[free].set(0, **DROP).at[free].max(turn, **DROP)
    leaving = jnp.sum(
        marks.at[free].get(mode="fill", fill_value=0, wrap_negative_indices=False) == turn, dtype=jnp.int32
    )
    # What was read says where to write: else XLA may read later, and copies all of them for that.
    refs = state.refs.at[jnp.where((named > 0) & (before >= 0), named, size)].add(2, **DROP)
    queue = _closed_up(replace(state, refs=refs), leaving)
    counters = state.counters.at[StepCounter.TAIL].add(-leaving)
    return replace(state, refs=refs, marks=marks, queue=queue, counters=counters)


def _closed_up(state: StepState, leaving: jax.Array) -> jax.Array:
    """The queue without the `leaving` blocks in it that have references: those behind the first of them move up."""
    size, head = state.queue.shape[0], state.counters[StepCounter.HEAD]
    length = state.counters[StepCounter.TAIL] - head

    def seek(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        begin, found = carry
        turn = begin - 1 - count_up(LANES)
        held = (turn >= 0) & (state.refs[state.queue[(head + turn) & (size - 1)]] >= 2)
        return begin - LANES, found + jnp.sum(held, dtype=jnp.int32)

    def move_up(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        begin, end, queue = carry
        turn = begin + count_up(LANES)
        block, queue = lax.optimization_barrier((queue[(head + turn) & (size - 1)], queue))
        kept = (turn < length) & (state.refs[block] < 2)
        sums = running_sum(kept)
        place = jnp.where(kept, (head + end + sums - 1) & (size - 1), size)
        return begin + LANES, end + sums[-1], queue.at[place].set(block, **DROP)

    begin, _ = lax.while_loop(lambda carry: carry[1] < leaving, seek, (length, jnp.zeros_like(leaving)))
    begin = jnp.maximum(begin, 0)
    return lax.while_loop(lambda carry: carry[0] < length, move_up, (begin, begin, state.queue))[2]

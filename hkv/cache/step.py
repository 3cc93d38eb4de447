"""A whole serving step at once, compiled: retire, allocate, address and register for every query of a ragged batch.

The form for accelerators: no host round trip, no loop over rows, work in proportion to queries, tokens and new blocks.
The rules are vLLM 0.33's, those of `hkv.dialects.vllm.machine`; a step means: every query's row in order retires
(`Code.RETIRE`), then every row in order allocates (`Code.ALLOCATE`) and advances. As long as the step's room suffices
it is exactly that, block ids and the free queue's order included. vLLM itself lets a row allocate before the next one
retires: as long as none is refused, that gives the same rows up to renaming of blocks, and equal ones where nothing
retires.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from hkv.cache import copies, registration, token_hashing
from hkv.cache.blocks import Queue, give_back, move, serve, slots_of, state_blocks, take
from hkv.cache.queries import EveryGroup, block_sizes, field, fields, known_rows, lines, queries, spread
from hkv.cache.registration import register
from hkv.cache.spans import DROP, count_up, holder, registered, several, unified
from hkv.cache.state import (
    HASH_WORDS,
    PAD,
    StepBatch,
    StepCounter,
    StepRequest,
    StepResult,
    StepState,
    init,
    replace,
    room_for,
)
from hkv.cache.tails import StepFacts
from hkv.cache.token_hashing import hash_tokens
from hkv.dialects.vllm.rules import reads
from hkv.dialects.vllm.rules.admit import Spread, spread_row
from hkv.dialects.vllm.rules.parameters import READ_FIELDS, CacheField, GroupField, Parameters
from hkv.machine.native_regions import Dispatched
from hkv.state.loops import divide
from hkv.state.status import Status


def step(parameters: Parameters, state: StepState, batch: StepBatch, *, room: int) -> tuple[StepState, StepResult]:
    """One serving step of the rows that a batch names. A pure function, not jitted itself: `jitted` is.

    Queries are served in order. One for whose new blocks too few are free takes nothing, and later ones that need fewer
    may still be served.

    Args:
      parameters: the configuration.
      state: the cache.
      batch: the new tokens.
      room: static; most blocks that the step gives back, that it hands out, and that it registers, each. `room_for`
        bounds what is needed. A query that does not fit is refused (`Status.STEP_FULL`); what cannot be given back or
        registered waits.

    Returns:
      The new state, and the answers.
    """
    parameters, state, batch = unified(parameters, state, batch)
    groups = parameters.groups[: state.rows.shape[1]]
    asked, rows, wanted = queries(parameters, groups, state, batch)
    at, status = asked.rows, asked.status
    taking = (status == int(Status.OK)) & (asked.counts > 0)
    longest = parameters.cache[CacheField.MAX_MODEL_LEN]
    # Steps that have not come back still read: what they see is not given back yet.
    processed = jnp.maximum(jnp.minimum(rows.computed, longest) - batch.in_flight, 0)
    # All rows retire before any row allocates: blocks that one gives back may be another's in the same step.
    begin = jnp.maximum(rows.first, field(groups, GroupField.SINKS))
    end = jnp.where(taking[:, None], jnp.minimum(_skipped(groups, processed), rows.length), begin)
    state, first, waiting = give_back(state, at, begin, jnp.maximum(end, begin), room)
    rows = rows._replace(first=jnp.where(end > begin, first, rows.first))

    before_step = rows
    had, grown = rows.length, jnp.maximum(wanted, rows.length)
    new = grown - had
    recurrent = field(groups, GroupField.RECURRENT) != 0
    left = None
    if rows.export is not None:
        view = EveryGroup(parameters.cache, groups, at.shape[0])
        left = registration.plan(view, state, at, rows, jnp.where(taking, asked.counts, 0))
    spread = _spread(groups, had, grown, rows.grown, left)
    # A recurrent row takes one block however far it grows: columns that are passed over stay null.
    need = jnp.where(recurrent, jnp.maximum(grown - spread.end, 0), new)
    need = jnp.where(taking[:, None], need, 0)
    free = state.counters[StepCounter.TAIL] - state.counters[StepCounter.HEAD]
    queue = Queue(free, jnp.minimum(free, room), parameters.cache[CacheField.WATERMARK])
    total = need.sum(axis=1, dtype=jnp.int32)
    if rows.partial is not None:
        total += jnp.where(taking, (rows.partial > 0).sum(axis=1, dtype=jnp.int32), 0)
    # A request without computed tokens holds nothing yet: it does not count as running for the watermark.
    live = (state.requests[:, StepRequest.LIVE] != 0) & (state.requests[:, StepRequest.COMPUTED] > 0)
    served, lacks = serve(taking, total, live[at] & asked.known, jnp.any(live), queue)
    refusal = jnp.where(lacks, int(Status.NO_ROOM), int(Status.STEP_FULL)).astype(jnp.int32)
    status = jnp.where(taking & ~served, refusal, status)
    if left is not None:
        left = left.only(served)
        rows = registration.noted(rows, left, taking)
    if rows.grown is not None:
        moved = jnp.where(recurrent & served[:, None], spread.moved, 0)
        state = move(state, at, spread.scratch, spread.gap_end, moved, room)
        rows = rows._replace(grown=jnp.where(served[:, None], 1, rows.grown))
    need, copied = jnp.where(served[:, None], need, 0), None
    if rows.partial is None:
        state = take(state, at, grown, need, room)
    else:
        state, copied = copies.take(state, at, before_step, grown, need, served, room)
        rows = rows._replace(partial=jnp.where(copied.needed, 0, rows.partial))

    counts, lengths = (jnp.where(served, tokens, 0) for tokens in (asked.counts, asked.lengths))
    state = _hash(parameters, state, at, asked.starts, counts, rows.computed, batch.tokens)
    before, computed = rows.computed, rows.computed + counts
    # Keys before registration: what this step fills is registered in it, though it is written only when the step
    # runs.
    rows = rows._replace(length=jnp.where(served[:, None], grown, had), computed=computed)
    turn = None if copied is None else StepFacts(before, before_step.grown == 0, copied)
    state, rows, ended, later = register(parameters, state, at, rows, computed, served, room, turn, left)
    # Lines of queries that are left out go past the end, where a scatter drops them.
    place = jnp.where(taking, at, state.requests.shape[0])
    state = replace(state, requests=state.requests.at[place].set(lines(rows), **DROP))
    blocks, offsets = slots_of(groups, state.rows, at, before, asked.starts, lengths, batch.tokens.shape[0])
    read, write = state_blocks(groups, state.rows, at, had, before, counts)
    result = StepResult(status, asked.allowed, blocks, offsets, read, write, ended, jnp.stack([waiting, later]))
    if left is not None:
        result = dataclasses.replace(result, checkpoints=registration.answer(state, at, before, left))
    if copied is None:
        return state, result
    # Only now: until all of the step's blocks are handed out, the sources of its copies must not be among them.
    return copies.give_back(state, copied), dataclasses.replace(result, copies=copied.pairs())


@functools.cache
def jitted(room: int):
    """`step` compiled, its state donated: `jitted(room)(parameters, state, batch)`."""
    return jax.jit(functools.partial(step, room=room), donate_argnums=(1,))


def specialised(parameters: Parameters, room: int):
    """`step` compiled for one configuration, its state donated: `specialised(parameters, room)(state, batch)`.

    Its parameters are constants, so that what only other configurations need is left out, and XLA:CPU compiles it in
    few pieces (`hkv.machine.native_regions`). `jitted` is one program for all configurations of a shape; this is a new
    one at each call, to be kept.
    """
    constants = jax.tree.map(np.asarray, parameters)
    return Dispatched(lambda state, batch: step(constants, state, batch, room=room))


@functools.partial(jax.jit, donate_argnums=0)
def start(
    state: StepState, rows: jax.Array, roots: jax.Array, prompts: jax.Array | None = None
) -> tuple[StepState, jax.Array]:
    """Requests begin in empty rows, with no token computed.

    Args:
      state: donated.
      rows: int32[K], distinct rows; -1 for none.
      roots: uint32[K, 4], what stands for the key before a request's first: `hkv.keys.fingerprint.ROOT`, or other
        words, the same for requests that may share blocks (of one tenant, one LoRA).
      prompts: int32[K], tokens of their prompts, before whose ends sparse retention keeps blocks; None where it need
        not, or the ends are not known.

    Returns:
      The state, and a status int32[K]: NO_SUCH_SLOT for a row that does not exist or was named before, NOT_WAITING for
      one that is not empty.
    """
    given = jnp.zeros_like(rows) if prompts is None else prompts
    state, rows, roots, lengths = unified(state, rows, roots, given)
    at, known = known_rows(state, rows)
    used = known & (state.requests[at, StepRequest.LIVE] != 0)
    done = known & ~used
    place = jnp.where(done, rows, state.requests.shape[0])
    line = jnp.zeros_like(rows, shape=(rows.shape[0], state.requests.shape[1])).at[:, StepRequest.LIVE].set(1)
    line = line.at[:, StepRequest.PROMPT].set(jnp.maximum(lengths, 0).astype(jnp.int32))
    hashing = jnp.pad(roots.astype(jnp.uint32), ((0, 0), (0, state.hashing.shape[1] - 4)))
    requests = state.requests.at[place].set(line, **DROP)
    hashing = state.hashing.at[place].set(hashing, **DROP)
    status = jnp.where(known | (rows == PAD), int(Status.OK), int(Status.NO_SUCH_SLOT))
    status = jnp.where(used, int(Status.NOT_WAITING), status).astype(jnp.int32)
    return replace(state, requests=requests, hashing=hashing), status


@functools.partial(jax.jit, donate_argnums=0)
def finish(state: StepState, rows: jax.Array) -> tuple[StepState, jax.Array]:
    """Requests end, one after the other, and give back all they hold, group by group, the last block first.

    Works on every entry of the rows: K * G * W lanes.

    Args:
      state: donated.
      rows: int32[K], distinct rows; -1 for none.

    Returns:
      The state, and a status int32[K]: NO_SUCH_SLOT for rows that have no request, or were named before.
    """
    state, rows = unified(state, rows)
    at, known = known_rows(state, rows)
    done = known & (state.requests[at, StepRequest.LIVE] != 0)
    size, groups, width = rows.shape[0], *state.rows.shape[1:]
    # From the first entry on; `give_back` walks each span from its end, as vLLM's `free` does.
    end = jnp.where(done[:, None], fields(state, at).length, 0)
    state, _, _ = give_back(state, at, jnp.zeros_like(end), end, size * groups * width)
    place = jnp.where(done, rows, state.requests.shape[0])
    state = replace(state, requests=state.requests.at[place].set(0, **DROP))
    status = jnp.where(done | (rows == PAD), int(Status.OK), int(Status.NO_SUCH_SLOT))
    return state, status.astype(jnp.int32)


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
    known = registered(state, count_up(state.keys.shape[0])) if several(state) else state.refs % 2 == 1
    same &= ((state.keys[:, 4] == group.astype(jnp.uint32)) & known)[None]
    # Counted backwards from now, so that a count that wrapped around 2**32 still orders them; the oldest is the
    # first.
    age = (state.counters[StepCounter.REGISTERED].astype(jnp.uint32) - state.keys[:, 5])[None]
    return holder(state, jnp.argmax(jnp.where(same, age, 0), axis=1).astype(jnp.int32))


def _skipped(groups: jax.Array, tokens: jax.Array) -> jax.Array:
    """Whole blocks of each group that a row's query at `tokens` does not need, int32[Q, G]."""
    n = spread(groups, tokens)
    numbers = (jnp.broadcast_to(field(groups, each), n.shape) for each in READ_FIELDS)
    return divide(reads.skipped_tokens(n, *numbers), block_sizes(groups))


def _spread(
    groups: jax.Array,
    length: jax.Array,
    columns: jax.Array,
    grown: jax.Array | None,
    left: registration.Exports | None,
) -> Spread:
    """Shape of recurrent groups' rows of `length` entries that will have `columns`, int32[Q, G] each."""
    scratch = jnp.broadcast_to(field(groups, GroupField.SCRATCH), length.shape)
    before = jnp.zeros_like(length) if grown is None else grown
    exported = jnp.zeros_like(length) if left is None else (left.tokens > 0).astype(jnp.int32)
    return spread_row(length, columns, scratch, exported, before)


def _hash(
    parameters: Parameters,
    state: StepState,
    lines: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    computed: jax.Array,
    tokens: jax.Array,
) -> StepState:
    """The state with the keys of the hash blocks that `counts` new tokens of each row fill."""
    size = jnp.maximum(parameters.cache[CacheField.HASH_BLOCK], 1)
    ahead = token_hashing.lookahead(state)
    # Where hashing stands between steps: a hash block may fill over several of them.
    tails = state.hashing[lines, :HASH_WORDS] if ahead else state.hashing[lines]
    hashed = hash_tokens(size, tails, computed, starts, counts, tokens)
    rows = state.hashing.shape[0]
    place = jnp.where(hashed.filled, lines[hashed.request], rows)
    chains = state.chains.at[place, hashed.column].set(hashed.keys, **DROP)
    tails = hashed.tails
    if ahead:
        chains, last = token_hashing.settle(state, chains, lines, size, starts, counts, computed, tokens)
        tails = jnp.concatenate([tails, last], axis=1)
    hashing = state.hashing.at[jnp.where(counts > 0, lines, rows)].set(tails, **DROP)
    return replace(state, chains=chains, hashing=hashing)


__all__ = ["find", "finish", "init", "jitted", "room_for", "specialised", "start", "step"]

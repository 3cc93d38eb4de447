"""A small scheduler as functions of arrays: first come, first served, in chunks, preempting the last to come."""

# jax.numpy types some of its own arguments as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from hkv.cache.queries import EveryGroup, entries, first_of
from hkv.cache.registration import possible
from hkv.cache.spans import count_up, leaves_states, running_sum, token_queries
from hkv.cache.state import PAD, StepRequest
from hkv.dialects.vllm.rules.parameters import CacheField, GroupField
from hkv.pytrees import pytree
from hkv.serving.serving import Serving, Turn
from hkv.state.status import Status


@pytree()
@dataclasses.dataclass(frozen=True)
class StepPlan:
    """Tokens that a step computes: R queries, decodes first, over N places.

    Attributes:
      rows: int32[R], the row of each query; -1 for none.
      counts: int32[R], its tokens.
      cu_q_lens: int32[R + 1], where each begins.
      tokens: int32[N], the tokens, one query's after the other's; 0 behind the last.
      status: int32[R], of each row, not query: `hkv.Status`. All but OK are planned no token, in this step or a later
        one, as they are: BAD_COUNT for fewer known tokens than computed ones, below 0 or more than the history holds;
        NOT_RUNNING for tokens of a row without a request; ROW_FULL for more tokens than a request may have, or its row
        has room for.
    """

    rows: jax.Array
    counts: jax.Array
    cu_q_lens: jax.Array
    tokens: jax.Array
    status: jax.Array


def schedule(serving: Serving, history: jax.Array, known: jax.Array, arrived: jax.Array, *, budget: int) -> StepPlan:
    """The next step of all rows that have tokens to compute, at most `budget` of them.

    Rows with one token left (decodes) come before the others, and each kind in order of arrival. Chunks end where
    recurrent groups keep states: at a block's end if they begin inside it, else at the last one that they reach, the
    last before the final token included, and where hits end inside blocks at the last length from which the prompt can
    be resumed (vLLM 0.33 `Scheduler._mamba_block_aligned_split`). The last chunk needs no such end if every recurrent
    group leaves a state behind inside it.

    Args:
      serving: the cache.
      history: int32[R, L], the tokens of every row, prompt and generated.
      known: int32[R], how many there are; 0 leaves the row out of this step.
      arrived: int32[R], when each row's request came; lower numbers first.
      budget: static; N.
    """
    computed, unit = serving.cache.computed, serving.state_unit
    status = _status(serving, jnp.asarray(known, jnp.int32), history.shape[1])
    left = jnp.where((status == int(Status.OK)) & (known > 0), jnp.asarray(known, jnp.int32) - computed, 0)
    waits = (left == 0).astype(jnp.int32)
    *_, order = lax.sort(
        (waits, (left > 1).astype(jnp.int32), arrived.astype(jnp.int32), count_up(left.shape[0])), num_keys=3
    )

    def give(spent: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        asked = jnp.minimum(left[row], budget - spent)
        count = _chunk(computed[row], asked, left[row], unit)
        if serving.tail_unit:
            count = _before_tail(serving, row, count)
        if leaves_states(serving.cache.state):
            count = jnp.where((asked == left[row]) & _left_inside(serving, row, asked), asked, count)
        count = jnp.minimum(count, serving.cache.allowed[row])
        return spent + count, count

    _, counts = lax.scan(give, jnp.zeros_like(left[0]), order)
    ends = running_sum(counts)
    cu_q_lens = jnp.concatenate([jnp.zeros_like(ends[:1]), ends])
    query, within = token_queries(cu_q_lens, budget)
    row = order[query]
    live = (within >= 0) & (within < counts[query])
    tokens = history[row, jnp.where(live, computed[row] + within, 0)]
    rows, tokens = jnp.where(counts > 0, order, PAD), jnp.where(live, tokens, 0).astype(jnp.int32)
    return StepPlan(rows, counts, cu_q_lens, tokens, status)


def _status(serving: Serving, known: jax.Array, most: int) -> jax.Array:
    """Status int32[R] of rows of which `known` int32[R] tokens are to be computed, at most `most`."""
    cache = serving.cache
    fits = jnp.where((known >= 0) & (known <= most), known, 0)
    _, full = entries(cache.parameters, cache.parameters.groups[: cache.tables.shape[1]], cache.state, fits, fits)
    return first_of(
        (known != fits, Status.BAD_COUNT),
        ((known > 0) & ~cache.running, Status.NOT_RUNNING),
        ((known > 0) & (known < cache.computed), Status.BAD_COUNT),
        (full, Status.ROW_FULL),
    )


def victim(serving: Serving, plan: StepPlan, turn: Turn, arrived: jax.Array) -> jax.Array:
    """The row to preempt when some query found too few blocks: the last to come of all that run; -1 for none, int32[].

    `finish` it, and let it arrive again when blocks are free: it finds what it had registered.
    """
    refused = jnp.any((plan.counts > 0) & (turn.result.status == int(Status.NO_ROOM)))
    running = serving.cache.running & (jnp.count_nonzero(serving.cache.tables, axis=(1, 2)) > 0)
    last = jnp.argmax(jnp.where(running, arrived.astype(jnp.int32), -1)).astype(jnp.int32)
    return jnp.where(refused & jnp.any(running), last, PAD)


def _chunk(start: jax.Array, count: jax.Array, left: jax.Array, unit: int) -> jax.Array:
    """Tokens of a chunk from `start` on, at most `count` of the `left` ones, that ends where states are kept."""
    if unit == 1:
        return count
    end = start + count
    # The final token is computed again by a request that finds the rest: a state before it is kept, none behind it.
    last = jnp.where(count == left, (end - 1) // unit * unit, end // unit * unit)
    return jnp.where(last > start, last - start, count)


def _left_inside(serving: Serving, row: jax.Array, count: jax.Array) -> jax.Array:
    """True if the next `count` tokens of a row leave a state behind in every recurrent group, bool[]."""
    parameters, state = serving.cache.parameters, serving.cache.state
    groups = parameters.groups[: state.rows.shape[1]]
    start, prompt = (state.requests[row, int(name)][None] for name in (StepRequest.COMPUTED, StepRequest.PROMPT))
    left = possible(EveryGroup(parameters.cache, groups, 1), start, start + count[None], prompt)
    return jnp.all((left.tokens[0] > 0) | (groups[:, GroupField.RECURRENT] == 0))


def _before_tail(serving: Serving, row: jax.Array, count: jax.Array) -> jax.Array:
    """Tokens of a chunk of `count` ones that ends where the row's prompt keeps its last state, if it reaches that."""
    state, unit = serving.cache.state, serving.tail_unit
    drops = serving.cache.parameters.cache[CacheField.DROPS]
    prompt, start = state.requests[row, StepRequest.PROMPT], state.requests[row, StepRequest.COMPUTED]
    last = jnp.where(drops != 0, prompt // unit - 1, (prompt - 1) // unit) * unit
    return jnp.where((last > start) & (last < start + count), last - start, count)

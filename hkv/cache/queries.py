"""Queries of a step, and the fields of their rows: what is asked for, what cannot be, and what is needed for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from hkv.cache.spans import DROP, count_up, running_max
from hkv.cache.state import PAD, StepBatch, StepRequest, StepState, row_fields
from hkv.dialects.vllm.rules import reads
from hkv.dialects.vllm.rules.parameters import CacheField, GroupField, Parameters
from hkv.state.loops import ceil_divide, divide, remainder
from hkv.state.status import Status


class Rows(NamedTuple):
    """Fields of `StepState.requests` of Q rows: int32[Q] each, and from `length` on int32[Q, G].

    `grown` and those after it are left out where the state has them not.
    """

    live: jax.Array
    computed: jax.Array
    prompt: jax.Array
    shared_prefix: jax.Array
    length: jax.Array
    first: jax.Array
    cached: jax.Array
    grown: jax.Array | None = None
    partial: jax.Array | None = None
    export: jax.Array | None = None
    export_entry: jax.Array | None = None
    prefill: jax.Array | None = None


class EveryGroup(NamedTuple):
    """Parameters as the rules of `hkv.dialects.vllm.rules` read them, but of Q queries and all groups: int32[Q, G]."""

    cache: jax.Array
    groups: jax.Array
    queries: int

    def whole(self, field: CacheField) -> jax.Array:
        """A field of the whole cache."""
        return jnp.broadcast_to(self.cache[field], (self.queries, self.groups.shape[0]))

    def group(self, group: Any, field: GroupField) -> jax.Array:
        """A field of every group, whichever is asked for."""
        del group
        return jnp.broadcast_to(self.groups[None, :, field], (self.queries, self.groups.shape[0]))


class Queries(NamedTuple):
    """Q queries. int32[Q] each, but for `known`.

    Attributes:
      rows: their rows, 0 in place of those that do not exist.
      known: bool[Q], whether the row exists, and no query before names it.
      starts: places of their first tokens, ascending.
      counts: settled tokens.
      lengths: tokens, drafts included.
      status: `Status` of what cannot be; OK for all others.
      allowed: settled tokens that may be computed at once.
    """

    rows: jax.Array
    known: jax.Array
    starts: jax.Array
    counts: jax.Array
    lengths: jax.Array
    status: jax.Array
    allowed: jax.Array


def field(groups: jax.Array, name: GroupField) -> jax.Array:
    """A field of every group, int32[1, G]."""
    return groups[None, :, name]


def block_sizes(groups: jax.Array) -> jax.Array:
    """Tokens in a block of every group, int32[1, G]; 1 for rows beyond the groups."""
    return jnp.maximum(field(groups, GroupField.BLOCK), 1)


def spread(groups: jax.Array, tokens: jax.Array) -> jax.Array:
    """Numbers int32[n] for every group, int32[n, G]."""
    return jnp.broadcast_to(tokens[:, None], (tokens.shape[0], groups.shape[0]))


def known_rows(state: StepState, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows int32[K] that exist, 0 in place of others; and which do and are not named before, bool[K]."""
    size = state.requests.shape[0]
    inside = (rows >= 0) & (rows < size)
    place, left = jnp.where(inside, rows, size), rows.shape[0] - count_up(rows.shape[0])
    # The first query that names a row has it: of several, the one with most queries behind it.
    most = jnp.zeros_like(state.requests[:, 0]).at[place].max(left, **DROP)
    known = inside & (most.at[place].get(mode="fill", fill_value=0, wrap_negative_indices=False) == left)
    return jnp.where(inside, rows, 0), known


def fields(state: StepState, rows: jax.Array) -> Rows:
    """Fields of rows int32[Q] that exist."""
    # Read once: repeated after the lines are written, the gather would need the old ones, and a copy of them.
    lines = lax.optimization_barrier(state.requests[rows])
    front, groups = len(StepRequest), state.rows.shape[1]
    parts = [lines[:, start : start + groups] for start in range(front, lines.shape[1], groups)]
    names = [name.name.lower() for name in row_fields(len(parts))]
    return Rows(*(lines[:, int(f)] for f in StepRequest), **dict(zip(names, parts, strict=True)))


def lines(rows: Rows) -> jax.Array:
    """The lines of `StepState.requests` that have these fields."""
    # Fields side by side by group, not group by group: a field of all groups is one slice.
    front = jnp.stack([rows.live, rows.computed, rows.prompt, rows.shared_prefix], axis=1)
    some = [rows.grown, rows.partial, rows.export, rows.export_entry, rows.prefill]
    more = [part for part in some if part is not None]
    return jnp.concatenate([front, rows.length, rows.first, rows.cached, *more], axis=1)


def queries(
    parameters: Parameters, groups: jax.Array, state: StepState, batch: StepBatch
) -> tuple[Queries, Rows, jax.Array]:
    """The queries of a batch, the fields of their rows, and the length that each needs, int32[Q, G]."""
    at, known = known_rows(state, batch.rows)
    rows = fields(state, at)
    size = batch.tokens.shape[0]
    # Lengths that fall, or leave the array, are made ascending first; a query that this changed is refused.
    cuts = running_max(jnp.clip(batch.cu_q_lens, 0, size))
    ordered = (cuts == batch.cu_q_lens)[1:] & (cuts == batch.cu_q_lens)[:-1]
    asked = cuts[1:] - cuts[:-1]
    outside = ~ordered | (batch.drafts < 0) | (batch.drafts > asked) | (batch.in_flight < 0)
    counts = jnp.where(outside, 0, asked - batch.drafts)
    lengths = jnp.where(counts > 0, asked, 0)
    wanted, full = entries(parameters, groups, state, rows.computed + counts, rows.computed + lengths)
    # A chunk must end with the block of a recurrent state that it began inside.
    allowed = jnp.minimum(counts, before_states(groups, rows.computed))
    status = first_of(
        (outside & (batch.rows != PAD), Status.OUT_OF_RANGE),
        ((counts > 0) & ~known & (batch.rows != PAD), Status.NO_SUCH_SLOT),
        ((counts > 0) & known & (rows.live == 0), Status.NOT_RUNNING),
        ((counts > 0) & known & full, Status.ROW_FULL),
        (known & (counts > allowed), Status.CROSSES_STATE),
    )
    nothing = ~known | (rows.live == 0)
    counts, lengths = (jnp.where(nothing, 0, tokens) for tokens in (counts, lengths))
    found = Queries(at, known, cuts[:-1], counts, lengths, status, jnp.where(nothing, 0, allowed))
    return found, rows, wanted


def before_states(groups: jax.Array, computed: jax.Array) -> jax.Array:
    """Tokens up to the end of the first recurrent group's block that a row with `computed` int32[R] tokens is inside.

    A chunk that went on behind it would leave no state there, while the block is registered as the one that holds it.
    vLLM 0.33's scheduler ends chunks there (`Scheduler._mamba_block_aligned_split`).

    Returns:
      int32[R]; `reads.UNLIMITED` for rows that are inside none.
    """
    size = block_sizes(groups)
    inside = remainder(spread(groups, computed), size)
    kept = (field(groups, GroupField.RECURRENT) != 0) & (field(groups, GroupField.CACHEABLE) != 0)
    rest = jnp.where(kept & (inside > 0), size - inside, reads.UNLIMITED)
    return jnp.min(rest, axis=1, initial=reads.UNLIMITED)


def entries(
    parameters: Parameters, groups: jax.Array, state: StepState, main: jax.Array, end: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Entries int32[Q, G] for `main` settled tokens, `end` with drafts, and whether that is more than fits, bool[Q]."""
    longest = parameters.cache[CacheField.MAX_MODEL_LEN]
    slots = spread(groups, jnp.minimum(end, longest))
    tokens = jnp.where(field(groups, GroupField.RECURRENT) != 0, spread(groups, main), slots)
    size = block_sizes(groups)
    wanted = ceil_divide(tokens, size) + field(groups, GroupField.SCRATCH)
    wanted = jnp.where(field(groups, GroupField.ONE_BLOCK) != 0, 1, wanted)
    exists = count_up(groups.shape[0])[None] < parameters.cache[CacheField.GROUPS]
    wanted = jnp.where(exists, wanted, 0)
    hashes = divide(main, jnp.maximum(parameters.cache[CacheField.HASH_BLOCK], 1))
    full = (main > longest) | (hashes > state.chains.shape[1])
    return wanted, full | jnp.any(wanted > state.rows.shape[2], axis=1)


def first_of(*cases: tuple[jax.Array, Status]) -> jax.Array:
    """The status of the first case that holds, int32[Q]; OK where none does."""
    status = jnp.zeros_like(cases[0][0], dtype=jnp.int32)
    for holds, code in reversed(cases):
        status = jnp.where(holds, int(code), status)
    return status

"""Prefill and decode in one `lax.while_loop`, which carries tokens, tables, keys and pages: the host is not asked.

A turn of the loop gives every row that is not done its next tokens: one `hkv.cache.step`, then the layers. Rows in the
middle of their prompt take a chunk; others their last token, and drafts after it, of which those that the model would
have said itself stay. The loop ends when all rows are done, or when some row was refused for lack of blocks.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from examples.hybrid_decoder import audit
from examples.hybrid_decoder.drafts import propose
from examples.hybrid_decoder.model import DELTA, Model, Weights
from examples.hybrid_decoder.paged import Addresses, Layouts, forward, write_states
from hkv.cache import step as serving
from hkv.cache.ragged import packed, padded
from hkv.cache.state import StepBatch, StepRequest, StepResult, StepState
from hkv.dialects.vllm.rules.parameters import Parameters
from hkv.layout.block_layout import Layout
from hkv.state.status import Status

COUNTS = ("turns", "tokens", "drafted", "accepted", "refused", "deferred", "wrong")
"""Counters, in this order: turns of the loop, tokens generated, drafts, those that stayed, rows refused, blocks given
back or registered late, and reads that the audit found wrong."""


class Rows(NamedTuple):
    """The requests. All int32, one line a row.

    Attributes:
      history: int32[R, N], tokens: the prompt's, then those generated.
      length: how many there are.
      target: how many there shall be; 0 for an empty row.
      ready: how many have their values in pages. The cache may know fewer: accepted drafts it is told a turn later.
    """

    history: jax.Array
    length: jax.Array
    target: jax.Array
    ready: jax.Array


class Carry(NamedTuple):
    """State of the loop, which each turn changes.

    Attributes:
      cache: the cache.
      pool: uint32[words], the pages.
      rows: the requests.
      refused: bool[R], rows that found too few blocks in this turn.
      counts: int32[7], see `COUNTS`.
      held: int32[G], blocks of each group at the turn in which all together were most; `most` int32[2], that sum, and
        blocks of one group if it kept every token.
      logits: float32[R, N, vocabulary], those of every token computed; no rows where they are not kept.
      tags: uint32[blocks, tokens], content of each slot as the audit believes it; no rows without audit.
    """

    cache: StepState
    pool: jax.Array
    rows: Rows
    refused: jax.Array
    counts: jax.Array
    held: jax.Array
    most: jax.Array
    logits: jax.Array
    tags: jax.Array


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static settings.

    Attributes:
      model: the sizes.
      layouts: of each kind, in the model's order.
      chunk: most tokens of a row in a turn of prefill.
      drafts: most drafts of a row in a turn of decode.
      room: of `hkv.cache.step.step`.
      kernels: True if attention may be a GPU's kernel.
    """

    model: Model
    layouts: tuple[Layout, ...]
    chunk: int
    drafts: int
    room: int
    kernels: bool

    @property
    def by_kind(self) -> Layouts:
        """The layouts by kind."""
        return dict(zip(self.model.kinds, self.layouts, strict=True))


class Turn(NamedTuple):
    """Request of a turn to the cache. int32[R] each: new tokens, drafts, and the first position computed."""

    counts: jax.Array
    drafts: jax.Array
    start: jax.Array


def run(
    plan: Plan, decoding: bool, parameters: Parameters, weights: list[Weights], carry: Carry, stop_early: jax.Array
) -> Carry:
    """Turns until all rows are done, or one is refused.

    Args:
      plan: static.
      decoding: static. Turns of decode, one token and drafts a row; else of prefill, a chunk a row, until no row has
        more left than a turn of decode computes.
      parameters: the cache's configuration.
      weights: the model's.
      carry: everything else.
      stop_early: bool[], whether to end as soon as any row is done, for a host that has others waiting.
    """

    def more(carry: Carry) -> jax.Array:
        rows = carry.rows
        active = rows.length < rows.target
        left = rows.length - carry.cache.requests[:, StepRequest.COMPUTED]
        done = (rows.target > 0) & ~active
        prefilling = jnp.any(active & (left > plan.drafts + 1))
        busy = jnp.any(active) & ~(stop_early & jnp.any(done)) if decoding else prefilling
        return busy & ~jnp.any(carry.refused)

    def body(carry: Carry) -> Carry:
        return turn(plan, decoding, parameters, weights, carry)

    return lax.while_loop(more, body, carry._replace(refused=jnp.zeros_like(carry.refused)))


def turn(plan: Plan, decoding: bool, parameters: Parameters, weights: list[Weights], carry: Carry) -> Carry:
    """One turn of every row."""
    model, layouts = plan.model, plan.by_kind
    width = plan.drafts + 1 if decoding else plan.chunk
    carry, asked = _ask(plan, carry, width, plan.drafts if decoding else 0)
    history, computed = carry.rows.history, carry.cache.requests[:, StepRequest.COMPUTED]
    slots = width + (plan.drafts if decoding else 0)
    flat, ends = packed(_from(history, computed, slots), asked.counts + asked.drafts)
    batch = StepBatch(flat, ends, jnp.arange(len(computed)), asked.drafts, jnp.zeros_like(computed))
    before = carry.cache
    cache, result = serving.step(parameters, before, batch, room=plan.room)
    served = (asked.counts > 0) & (result.status == int(Status.OK))
    blocks, offsets = (padded(values, ends, slots) for values in (result.blocks, result.offsets))
    where = _addresses(model, cache, result, (blocks, offsets), computed, asked, served, width)
    pool, tags, wrong = carry.pool, carry.tags, jnp.int32(0)
    if tags.shape[0]:
        names = audit.prefix_tags(history)
        pool, tags = audit.poison(pool, tags, plan.layouts[0], before, cache)
        wrong = audit.wrong_reads(model, tags, names, where)
    settled = not (decoding and plan.drafts)
    tokens = _from(history, asked.start, width)
    logits, pool, states = forward(model, layouts, weights, pool, tokens, where, settled, plan.kernels)

    end = computed + jnp.where(served, asked.counts, 0)
    rows, accepted = _choose(plan, carry.rows, logits, asked, where, end, served)
    kept = jnp.where(served, end - asked.start + accepted, 0)
    pool = write_states(model, layouts, pool, states, kept, where.states)
    if tags.shape[0]:
        tags = audit.tag(model, tags, audit.prefix_tags(rows.history), where, end + accepted)
    held = jnp.count_nonzero(cache.rows, axis=(0, 2)).astype(jnp.int32)
    whole = jnp.sum(-(-jnp.where(rows.target > 0, end, 0) // model.block), dtype=jnp.int32)
    most = jnp.stack([held.sum(), whole])
    grown = held.sum() >= carry.most[0]
    waits = (result.status == int(Status.OK)) | (result.status == int(Status.STEP_FULL))
    refused = (asked.counts > 0) & ~waits
    new = (jnp.int32(1), jnp.sum(rows.length - carry.rows.length), jnp.sum(jnp.where(served, asked.drafts, 0)))
    new += (jnp.sum(accepted), jnp.sum(refused), jnp.sum(result.deferred), wrong)
    return Carry(
        cache=cache,
        pool=pool,
        rows=rows,
        refused=refused,
        counts=carry.counts + jnp.stack(new).astype(jnp.int32),
        held=jnp.where(grown, held, carry.held),
        most=jnp.where(grown, most, carry.most),
        logits=_note(carry.logits, logits, asked.start, kept),
        tags=tags,
    )


def _ask(plan: Plan, carry: Carry, width: int, drafts: int) -> tuple[Carry, Turn]:
    """Chooses how far every row goes. Drafts are put behind the rows' tokens."""
    rows, computed = carry.rows, carry.cache.requests[:, StepRequest.COMPUTED]
    active = rows.length < rows.target
    end = _chunk_end(plan.model, rows, computed, jnp.minimum(computed + width, rows.length))
    counts = jnp.where(active, end - computed, 0)
    if not drafts:
        return carry, Turn(counts, jnp.zeros_like(counts), rows.ready)
    found, many = propose(rows.history, rows.length, drafts)
    many = jnp.minimum(many, jnp.maximum(rows.target - rows.length - 1, 0))
    many = jnp.where(active & (end == rows.length), jnp.minimum(many, width - (end - rows.ready)), 0)
    place = rows.length[:, None] + jnp.arange(drafts)
    place = jnp.where(jnp.arange(drafts) < many[:, None], place, rows.history.shape[1])
    line = jnp.arange(place.shape[0])[:, None]
    rows = rows._replace(history=rows.history.at[line, place].set(found, mode="drop"))
    return carry._replace(rows=rows), Turn(counts, many, rows.ready)


def _chunk_end(model: Model, rows: Rows, computed: jax.Array, end: jax.Array) -> jax.Array:
    """End of a chunk up to `end` int32[R] for which recurrent states fall on blocks, where others find them.

    A chunk that starts inside a block does not go beyond it; one that does not finish the row's tokens ends with a
    block if it can; and the last whole block ends a chunk (vLLM 0.33 `_mamba_block_aligned_split`). Where accepted
    drafts fill the block that the cache knows of, it is told of those alone: it refuses a chunk that goes on behind.
    """
    if DELTA not in model.kinds:
        return end
    size, start = model.block_of(DELTA), rows.ready
    boundary = -(-start // size) * size
    inside = (start % size != 0) & (end > boundary)
    last = end // size * size
    aligned = jnp.where((last > start) & (end != last), last, end)
    end = jnp.where(inside, boundary, aligned)
    rest = -computed % size
    return jnp.where(rest > 0, jnp.minimum(end, computed + rest), end)


def _from(table: jax.Array, start: jax.Array, width: int) -> jax.Array:
    """`width` elements of each row of int32[R, N] from `start` int32[R] on."""
    at = jnp.minimum(start[:, None] + jnp.arange(width), table.shape[1] - 1)
    return jnp.take_along_axis(table, at, axis=1)


def _addresses(
    model: Model,
    cache: StepState,
    result: StepResult,
    slots: tuple[jax.Array, jax.Array],
    computed: jax.Array,
    asked: Turn,
    served: jax.Array,
    width: int,
) -> Addresses:
    """Of the tokens from `asked.start` on: of those the cache is told of, accepted drafts have their values already."""
    ahead = asked.start - computed
    counts = jnp.where(served, asked.counts + asked.drafts - ahead, 0)
    token = jnp.arange(width)
    live = (token < counts[:, None])[:, None]
    at = jnp.minimum(ahead[:, None] + token, slots[0].shape[2] - 1)[:, None]
    blocks, offsets = (jnp.where(live, jnp.take_along_axis(array, at, axis=2), -1) for array in slots)
    states = jnp.full_like(computed, -1)
    if DELTA in model.kinds:
        states = result.writes[:, model.group(DELTA)]
    return Addresses(cache.rows, blocks, offsets, asked.start, counts, states)


def _choose(
    plan: Plan, rows: Rows, logits: jax.Array, asked: Turn, where: Addresses, end: jax.Array, served: jax.Array
) -> tuple[Rows, jax.Array]:
    """Appends what the model says, greedily, to rows whose tokens are all computed: drafts it agrees with, one more.

    A draft beyond the block of a recurrent state does not stay: its state would have no page yet.

    Returns:
      The rows, and how many drafts stayed, int32[R].
    """
    speaks = served & (end == rows.length)
    first = jnp.where(speaks, end - asked.start - 1, 0)
    most = min(plan.drafts, logits.shape[1] - 1) + 1
    at = jnp.minimum(first[:, None] + jnp.arange(most), logits.shape[1] - 1)
    said = jnp.argmax(jnp.take_along_axis(logits, at[..., None], axis=1), axis=-1).astype(jnp.int32)
    drafts = _from(rows.history, rows.length, most)
    agreed = (said == drafts) & (jnp.arange(most) < asked.drafts[:, None])
    accepted = jnp.sum(jnp.cumprod(agreed, axis=1), axis=1, dtype=jnp.int32)
    if DELTA in plan.model.kinds:
        size = plan.model.block_of(DELTA)
        accepted = jnp.minimum(accepted, -(-end // size) * size - end)
    accepted = jnp.where(speaks, accepted, 0)
    place = rows.length[:, None] + jnp.arange(most)
    place = jnp.where(speaks[:, None] & (jnp.arange(most) <= accepted[:, None]), place, rows.history.shape[1])
    history = rows.history.at[jnp.arange(place.shape[0])[:, None], place].set(said, mode="drop")
    length = rows.length + jnp.where(speaks, accepted + 1, 0)
    ready = jnp.where(served, end + accepted, rows.ready)
    return Rows(history, length, rows.target, ready), accepted


def _note(kept: jax.Array, logits: jax.Array, start: jax.Array, counts: jax.Array) -> jax.Array:
    """Puts the logits of `counts` tokens of each row in their places; not those of drafts that did not stay."""
    if not kept.shape[0]:
        return kept
    token = jnp.arange(logits.shape[1])
    place = jnp.where(token < counts[:, None], start[:, None] + token, kept.shape[1])
    return kept.at[jnp.arange(kept.shape[0])[:, None], place].set(logits, mode="drop")

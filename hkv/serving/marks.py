"""The debug mode of a served cache: which slots and states of the pool have been written, checked wherever one is read.

A cache that was made with `debug=True` has a mark for every slot of every layer. `step` takes back those of the slots
that it hands out, `write` and `write_state` set them, and whatever reads requires them. Checks are
`jax.experimental.checkify`'s: outside `jit` they raise at once, inside one the function goes through
`checkify.checkify`. A cache without marks traces nothing of this.
"""

# jax.numpy types some of its own arguments as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from hkv.cache.spans import DROP, count_up
from hkv.cache.state import PAD, StepResult
from hkv.keys import fingerprint
from hkv.pytrees import pytree
from hkv.serving.pages import LayerPages, LayerStack
from hkv.state.loops import divide

Array = jax.Array | np.ndarray

Index = int | jax.Array
"""Place of a layer in `Marks.layers`; an array where layers are data."""

UNWRITTEN = -1
"""Length of a state that was not written."""

_made = itertools.count(1)


@pytree()
@dataclasses.dataclass(frozen=True)
class Marks:
    """Slots and states that have been written since a step handed them out.

    Attributes:
      step: int32[], steps so far.
      lineage: uint32[], a number for the cache and all its steps so far.
      ended: int32[R], requests of each row that have ended.
      layers: for each layer, in the order of `Serving.layers`: bool[blocks, states in a block] of a layer of tokens;
        int32[blocks], the tokens that the state stands after, of a layer of states, -1 for none.
    """

    step: jax.Array
    lineage: jax.Array
    ended: jax.Array
    layers: tuple[jax.Array, ...]


@pytree()
@dataclasses.dataclass(frozen=True)
class Span:
    """Tokens that each query of one step computes, as the marks need them.

    Attributes:
      step: int32[], the step.
      lineage: uint32[], the marks' behind it.
      rows: int32[Q], the row of each query; -1 for those that took nothing.
      ended: int32[Q], requests of that row that had ended.
      before: int32[Q], tokens of the row before the step.
      after: int32[Q], tokens of the row after it, without drafts.
    """

    step: jax.Array
    lineage: jax.Array
    rows: jax.Array
    ended: jax.Array
    before: jax.Array
    after: jax.Array


def unwritten(layers: Sequence[LayerPages], rows: int) -> Marks:
    """Marks of an empty pool, with a lineage that no other cache of this process has."""

    none = jnp.zeros(rows, jnp.int32)
    return Marks(jnp.int32(0), jnp.uint32(next(_made)), none, tuple(map(_empty, layers)))


def handed_out(
    marks: Marks,
    layers: Sequence[LayerPages],
    result: StepResult,
    tokens: jax.Array,
    rows: jax.Array,
    lengths: tuple[jax.Array, jax.Array],
) -> tuple[Marks, Span]:
    """Marks after a step: those of copied blocks are their sources', slots and states that it handed out have none.

    Args:
      marks: the marks before it.
      layers: every layer's place.
      result: of the step.
      tokens: int32[N], of the step.
      rows: int32[Q], the row of each query; -1 for those that took nothing.
      lengths: int32[Q] twice, tokens of those rows before the step and after it.
    """

    def one(layer: LayerPages, before: Array) -> jax.Array:
        held = jnp.asarray(before)
        group, none = layer.group, len(held)
        if result.copies is not None:
            sources, targets = result.copies[:, group, 0], result.copies[:, group, 1]
            held = held.at[jnp.where(sources >= 0, targets, none)].set(held[jnp.maximum(sources, 0)], **DROP)
        if not layer.states:
            return held.at[_or(result.blocks[group], none), result.offsets[group]].set(False, **DROP)
        writes = result.writes[:, group]
        # A state that goes on in its block stays readable until it is written again: its length tells old from new.
        held = held.at[_or(jnp.where(writes == result.reads[:, group], -1, writes), none)].set(UNWRITTEN, **DROP)
        if result.checkpoints is None:
            return held
        return held.at[_or(result.checkpoints[:, group, 1], none)].set(UNWRITTEN, **DROP)

    found = tuple(one(layer, held) for layer, held in zip(layers, marks.layers, strict=True))
    # Two steps from one cache are told apart by what they were asked and answered.
    told = (marks.lineage[None], tokens, rows, *lengths, result.blocks, result.offsets, result.reads, result.writes)
    words = jnp.concatenate([part.astype(jnp.uint32).reshape(-1) for part in told])
    lineage = fingerprint.digests(words[None])[0, 0]
    ended = marks.ended[jnp.maximum(rows, 0)]
    return Marks(marks.step + 1, lineage, marks.ended, found), Span(marks.step + 1, lineage, rows, ended, *lengths)


def with_ended(marks: Marks, rows: jax.Array, done: jax.Array) -> Marks:
    """Marks after requests in rows int32[K] have ended, those that are `done` bool[K]."""
    place = jnp.where(done & (rows != PAD), rows, len(marks.ended))
    return dataclasses.replace(marks, ended=marks.ended.at[place].add(1, **DROP))


def with_slots(
    marks: Marks, index: Index, layer: LayerPages | LayerStack, blocks: jax.Array, offsets: jax.Array
) -> Marks:
    """Marks with slots of a layer of tokens written; blocks of -1 are none."""
    held = _held(marks, index, layer)
    return _with(marks, index, held.at[_or(blocks, len(held)), offsets].set(True, **DROP))


def with_states(
    marks: Marks, index: Index, layer: LayerPages | LayerStack, blocks: jax.Array, lengths: jax.Array
) -> Marks:
    """Marks with states of a layer written, that stand after `lengths` tokens; blocks of -1 are none."""
    held = _held(marks, index, layer)
    return _with(marks, index, held.at[_or(blocks, len(held))].set(lengths, **DROP))


def whole_blocks(marks: Marks, index: int, layer: LayerPages, blocks: Array, lengths: Array) -> Marks:
    """Marks with blocks of a layer written as a whole, that end after `lengths` tokens; blocks of -1 are none."""
    held = jnp.asarray(marks.layers[index])
    content = jnp.asarray(lengths, jnp.int32) if layer.states else True
    return _with(marks, index, held.at[_or(jnp.asarray(blocks), len(held))].set(content, **DROP))


def _held(marks: Marks, index: Index, like: LayerPages | LayerStack) -> jax.Array:
    """Marks of one layer; where its number is data, chosen among those of as many blocks and states."""
    if isinstance(index, int):
        return jnp.asarray(marks.layers[index])
    empty = _empty(like)
    for number, each in enumerate(marks.layers):
        if each.shape == empty.shape:
            empty = jnp.where(index == number, each, empty)
    return empty


def _with(marks: Marks, index: Index, held: jax.Array) -> Marks:
    layers = enumerate(marks.layers)
    if isinstance(index, int):
        return dataclasses.replace(marks, layers=tuple(held if number == index else each for number, each in layers))
    # Alike layers alone can be meant.
    found = (jnp.where(index == number, held, each) if each.shape == held.shape else each for number, each in layers)
    return dataclasses.replace(marks, layers=tuple(found))


def _empty(layer: LayerPages | LayerStack) -> jax.Array:
    """Marks of a layer of which nothing is written."""
    blocks, states = layer.layout.num_blocks, layer.layout.states_per_block
    return jnp.full(blocks, UNWRITTEN, jnp.int32) if layer.states else jnp.zeros((blocks, states), bool)


def _or(blocks: jax.Array, none: int) -> jax.Array:
    """Blocks, and an index that a scatter drops for none."""
    return jnp.where(blocks >= 0, blocks, none)


def require_batch(cu_q_lens: jax.Array, places: int) -> None:
    """Checks that queries lie one after the other from place 0 on, within the places there are."""
    checkify.check(cu_q_lens[0] == 0, "step: cu_q_lens begins at {first}: expected 0", first=cu_q_lens[0])
    fall = jnp.argmin(cu_q_lens[1:] - cu_q_lens[:-1])
    checkify.check(
        cu_q_lens[fall] <= cu_q_lens[fall + 1],
        "step: cu_q_lens falls from {above} to {below}: expected ascending places",
        above=cu_q_lens[fall],
        below=cu_q_lens[fall + 1],
    )
    last, n = cu_q_lens[-1], jnp.int32(places)
    checkify.check(last <= n, "step: cu_q_lens ends at {last}: expected at most {n}", last=last, n=n)


def require_turn(marks: Marks, span: Span, caller: str) -> None:
    """Checks that a turn is the last step's of this cache, and that no request of it has ended since."""
    text = f"{caller}: turn is of step {{given}}: expected the last one's, {{last}}"
    checkify.check(span.step == marks.step, text, given=span.step, last=marks.step)
    text = f"{caller}: turn is of a step {{given}} that this cache has not taken: expected its last one's"
    checkify.check(span.lineage == marks.lineage, text, given=span.step)
    gone = (span.rows != PAD) & (marks.ended[jnp.maximum(span.rows, 0)] != span.ended)
    query = jnp.argmax(gone)
    text = f"{caller}: the request of query {{query}} has ended, in row {{row}}, since the turn's step"
    checkify.check(~jnp.any(gone), text, query=query, row=span.rows[query])


def require_row(row: jax.Array, rows: int) -> None:
    """Checks that there is such a row."""
    text = "gather: row = {row}: expected a row from 0 to {last}"
    checkify.check((row >= 0) & (row < rows), text, row=row, last=jnp.int32(rows - 1))


def require_seen(
    marks: Marks,
    index: Index,
    layer: LayerPages | LayerStack,
    table: jax.Array,
    before: jax.Array,
    ends: jax.Array,
) -> None:
    """Checks that all tokens which the queries of a step see have been written.

    Args:
      marks: the marks.
      index: the layer's.
      layer: its place.
      table: int32[Q, W], block ids.
      before: int32[Q], the position of each query's first token.
      ends: int32[Q], the end of its last; 0 for queries that read nothing.
    """
    first = jnp.maximum(divide(before, jnp.int32(layer.unit)) * layer.unit - layer.lookback, 0)
    position, written = _positions(_held(marks, index, layer), table)
    seen = (position[None] >= first[:, None]) | (position[None] < layer.sink_tokens)
    _require(f"attend: layer {layer.name!r}", "query", written | ~seen | (position[None] >= ends[:, None]))


def require_found(marks: Marks, layers: Sequence[LayerPages], tables: jax.Array, hits: jax.Array) -> None:
    """Checks that prefixes which were found in the cache have been written in every layer.

    Args:
      marks: the marks.
      layers: every layer's place.
      tables: int32[K, G, W], block ids of the rows that arrived.
      hits: int32[K], tokens found; 0 for rows that took nothing.
    """
    for held, layer in zip(marks.layers, layers, strict=True):
        table, name = tables[:, layer.group], f"arrive: layer {layer.name!r}"
        if not layer.states:
            position, written = _positions(held, table)
            adopted = jnp.repeat(table != 0, layer.layout.states_per_block, axis=1)
            _require(name, "request", written | ~adopted | (position[None] >= hits[:, None]))
            continue
        last = jnp.max(jnp.where(table != 0, count_up(table.shape[1]), 0), axis=1)
        block = jnp.take_along_axis(table, last[:, None], axis=1)[:, 0]
        _require_states(name, "request", held, jnp.where(hits > 0, block, 0), hits)


def require_read(
    marks: Marks, index: Index, layer: LayerPages | LayerStack, blocks: jax.Array, lengths: jax.Array
) -> None:
    """Checks that states stand after as many tokens as their queries have before them; block 0 is none."""
    _require_states(f"read_state: layer {layer.name!r}", "query", _held(marks, index, layer), blocks, lengths)


def _positions(held: Array, table: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Positions that a table's entries hold, int32[n], and which of them have been written in each row, bool[Q, n]."""
    written = jnp.asarray(held)[table] & (table != 0)[..., None]
    return count_up(table.shape[1] * held.shape[1]), written.reshape(table.shape[0], -1)


def _require(place: str, who: str, good: jax.Array) -> None:
    """Checks tokens bool[Q, positions], and names the first that was not written."""
    row, position = jnp.unravel_index(jnp.argmin(good), good.shape)
    text = f"{place}: token {{position}} of {who} {{row}} was never written"
    checkify.check(jnp.all(good), text, position=position, row=row)


def _require_states(place: str, who: str, held: Array, blocks: jax.Array, lengths: jax.Array) -> None:
    """Checks states, and names the first that was not written, or stands after another number of tokens."""
    found = jnp.asarray(held)[blocks]
    good = (blocks == 0) | (found == lengths)
    row = jnp.argmin(good)
    text = f"{place}: the state after {{length}} tokens of {who} {{row}} was not written"
    text += ": its block holds the one after {found} (-1: none)"
    checkify.check(jnp.all(good), text, length=lengths[row], row=row, found=found[row])

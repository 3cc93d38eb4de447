"""Spans of entries, one for each line and group, cut into lanes: the work of a step is its spans, not its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hkv.cache.state import ERA, OWN_ERA, PAD, StepRequest, StepRow, StepState, row_fields
from hkv.state.loops import divide, remainder

DROP: Any = {"mode": "drop", "wrap_negative_indices": False}
"""Options of writes by lanes: a place outside the array is for none, and a negative one does not count from the end."""

Tree = TypeVar("Tree")

LINE = 8
"""Values that `running_sum` adds at once."""


class Spans(NamedTuple):
    """Spans, one a line and group in that order, cut into one lane an entry.

    `counts` int32[lines, groups]: lanes of each span; `starts` and `ends` int32[lines * groups]: which. `used` and
    `left` int32[]: lanes in use, and entries without a lane. The others, one a lane: whether it is in use, its span,
    the line and the group of that, and which entry of its span it is.
    """

    counts: jax.Array
    starts: jax.Array
    ends: jax.Array
    used: jax.Array
    left: jax.Array
    live: jax.Array
    span: jax.Array
    line: jax.Array
    group: jax.Array
    within: jax.Array

    def of(self, values: jax.Array) -> jax.Array:
        """The value of each lane's span, of values [lines, groups] or [lines * groups]."""
        return values.reshape(-1).at[self.span].get(mode="clip", wrap_negative_indices=False)


def cut(counts: jax.Array, room: int) -> Spans:
    """Cuts spans of `counts` entries, int32[lines, groups], into `room` lanes, as far as there is room."""
    flat, groups, lane = counts.reshape(-1), counts.shape[1], count_up(room)

    def sums() -> tuple[jax.Array, jax.Array]:
        ends = running_sum(flat)
        marks = jnp.zeros_like(flat, shape=room).at[jnp.minimum(ends - flat, room)].add(1, **DROP)
        return ends, running_sum(marks)

    ends, begun = once(jnp.max(flat, initial=0) > 0, sums)
    starts, span, used = jnp.minimum(ends - flat, room), jnp.maximum(begun - 1, 0), jnp.minimum(ends[-1], room)
    left, ends = ends[-1] - used, jnp.minimum(ends, room)
    kept = (ends - starts).reshape(counts.shape)
    first = starts.at[span].get(mode="clip", wrap_negative_indices=False)
    line, group = divide(span, groups), remainder(span, groups)
    return Spans(kept, starts, ends, used, left, lane < used, span, line, group, lane - first)


def once(enabled: jax.Array, make: Callable[[], Tree]) -> Tree:
    """Arrays that `make` makes from others; zeros where there is nothing to do.

    Otherwise XLA makes values anew wherever they are used, and compiles that as often. Where they are gathered from an
    array that is written next, some of those places may come after the write, and then the whole array is copied. A
    conditional is performed once, and alike ones are compiled once.
    """
    empty, axes = jax.eval_shape(make), varying_axes(enabled)
    return lax.cond(
        enabled, make, lambda: jax.tree.map(lambda leaf: marked(jnp.zeros(leaf.shape, leaf.dtype), axes), empty)
    )


def running_sum(values: jax.Array) -> jax.Array:
    """Sums of the values up to each, itself included, along the last axis; int32 whatever JAX's default integer is.

    Each of so many in a line, then of the lines' ends: on a CPU, 768 values take a sixth of what `jnp.cumsum` does.
    """
    whole, size = values.astype(jnp.int32), values.shape[-1]
    if size <= 2 * LINE:
        return jnp.sum(_up_to_each(whole), axis=-2, dtype=jnp.int32)
    inside = jnp.sum(_up_to_each(_lines(whole)), axis=-2, dtype=jnp.int32)
    before = running_sum(inside[..., -1]) - inside[..., -1]
    return (inside + before[..., None]).reshape(*values.shape[:-1], -1)[..., :size]


def running_max(values: jax.Array) -> jax.Array:
    """The largest of the values int32[n], none of them negative, up to each."""
    if values.shape[0] <= 2 * LINE:
        return jnp.max(_up_to_each(values), axis=-2)
    inside = jnp.max(_up_to_each(_lines(values)), axis=-2)
    before = jnp.pad(running_max(inside[:-1, -1]), (1, 0))
    return jnp.maximum(inside, before[:, None]).reshape(-1)[: values.shape[0]]


def _lines(values: jax.Array) -> jax.Array:
    """Values int32[..., n] in lines, int32[..., lines, LINE], with zeros after the last one."""
    front, size = values.shape[:-1], values.shape[-1]
    lines = -(-size // LINE)
    padding = [(0, 0)] * len(front) + [(0, lines * LINE - size)]
    return jnp.pad(values, padding).reshape(*front, lines, LINE)


def _up_to_each(lines: jax.Array) -> jax.Array:
    """Values of lines int32[..., size] that stand before or at each place, else 0, int32[..., size, size]."""
    size = lines.shape[-1]
    kept = np.triu(np.ones((size, size), np.int32)).reshape((1,) * (lines.ndim - 1) + (size, size))
    return lines[..., None] * kept


def count_up(size: int) -> jax.Array:
    """int32[size], 0, 1, 2, ..., whatever JAX's default integer is."""
    return jnp.arange(size, dtype=jnp.int32)


# Entries of the index: keys that blocks stand under, of which a block of full attention may have several.
#
# Entry b is block b under its only key, or under the key of the whole block. Where hits end inside blocks of full
# attention (`entry_parts`), entry p * N + b is block b of N under the key of its first p hash blocks. A block's
# entries count while they are of its era, which begins with the first key that it gets after it had none, or lost
# those it had.


def several(state: StepState) -> bool:
    """True if blocks may have several entries; static."""
    return state.keys.shape[0] > state.refs.shape[0]


def holder(state: StepState, entries: jax.Array) -> jax.Array:
    """The block of each entry."""
    return remainder(entries, jnp.full_like(entries, state.refs.shape[0])) if several(state) else entries


def registered(state: StepState, entries: jax.Array) -> jax.Array:
    """True for entries under whose keys their blocks can be found."""
    if not several(state):
        return state.refs[entries] % 2 == 1
    block = holder(state, entries)
    return (state.refs[block] % 2 == 1) & (state.keys[entries, ERA] == state.keys[block, OWN_ERA])


def first_words(state: StepState, keys: jax.Array, groups: jax.Array, stamps: jax.Array) -> jax.Array:
    """Rows of `StepState.keys` for blocks that had no key before, or lose those they had.

    Args:
      state: the cache, for its shapes.
      keys: uint32[n, 4].
      groups: int32[n].
      stamps: uint32[n], how many blocks were registered before.
    """
    words = jnp.concatenate([keys, groups.astype(jnp.uint32)[:, None], stamps[:, None]], axis=1)
    if not several(state):
        return words
    # Eras are counted from 1: no entry that was never written is of one.
    return jnp.concatenate([words, stamps[:, None] + jnp.uint32(1), stamps[:, None] + jnp.uint32(1)], axis=1)


def own(state: StepState, blocks: jax.Array) -> jax.Array:
    """The entry under its only key, or the whole block's, of each block; past all entries for none of the pool."""
    if not several(state):
        return blocks
    return jnp.where(blocks < state.refs.shape[0], blocks, state.keys.shape[0])


def inside(state: StepState) -> bool:
    """True if hits may end inside blocks; static."""
    return StepRow.PARTIAL in row_fields(field_count(state))


def field_count(state: StepState) -> int:
    """Fields of each group in a row's line of requests; static."""
    return (state.requests.shape[1] - len(StepRequest)) // state.rows.shape[1]


def leaves_states(state: StepState) -> bool:
    """True if chunks may leave states behind inside them; static."""
    return StepRow.EXPORT in row_fields(field_count(state))


# Values inside `jax.shard_map`, where JAX knows over which mesh axes each of them varies (`check_vma=True`).
#
# Both branches of a conditional, and what a loop carries from trip to trip, have to vary over the same axes.
# Constants vary over none: they are made like a value that is there (`jnp.zeros_like`), or marked here.


def varying_axes(value: jax.Array) -> frozenset[str]:
    """Mesh axes that a value varies over; none outside `jax.shard_map`."""
    kind: Any = jax.typeof(value)
    # JAX 0.10 keeps them in the manual axis type; others have `vma` itself.
    return frozenset(kind.mat.varying) if hasattr(kind, "mat") else frozenset(getattr(kind, "vma", ()))


def marked(value: jax.Array, axes: frozenset[str]) -> jax.Array:
    """The value, varying over `axes` too."""
    missing = tuple(sorted(axes - varying_axes(value)))
    return lax.pcast(value, missing, to="varying") if missing else value


def unified(*trees: Any) -> Any:
    """The same values as arrays, all varying over the mesh axes that any of them varies over."""
    values = jax.tree.map(jnp.asarray, trees)
    axes = frozenset[str]().union(*map(varying_axes, jax.tree.leaves(values)))
    return jax.tree.map(lambda leaf: marked(leaf, axes), values)


# Padded and ragged batches: the tokens of R rows as `[R, T]`, or one row's after the other's, as steps take them.


def packed(tokens: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first `counts` tokens of every row, one row's after the other's.

    Args:
      tokens: int32[R, T].
      counts: int32[R], 0 to T.

    Returns:
      int32[R * T], of which what lies behind the last row's tokens is 0, and int32[R + 1], where each row's begin
      (`cu_q_lens`).
    """
    rows, width = tokens.shape
    ends = running_sum(counts)
    cu_q_lens = jnp.concatenate([jnp.zeros_like(ends, shape=1), ends])
    within = count_up(width)[None]
    place = jnp.where(within < counts[:, None], (ends - counts)[:, None] + within, rows * width)
    return jnp.zeros_like(tokens, shape=rows * width).at[place].set(tokens, **DROP), cu_q_lens


def padded(values: jax.Array, cu_q_lens: jax.Array, width: int) -> jax.Array:
    """Slots of each row's tokens, padded with -1 to `width` (static).

    Args:
      values: int32[G, N], slots of a `StepResult`.
      cu_q_lens: int32[R + 1].
      width: most tokens of a row.

    Returns:
      int32[R, G, width].
    """
    within = count_up(width)[None]
    start, end = cu_q_lens[:-1, None], cu_q_lens[1:, None]
    found = values[:, jnp.minimum(start + within, values.shape[1] - 1)]
    return jnp.swapaxes(jnp.where((start + within < end)[None], found, PAD), 0, 1)


def token_queries(cu_q_lens: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """The query that the token at each place belongs to, and which of its tokens it is.

    Args:
      cu_q_lens: int32[Q + 1], where each query begins, ascending.
      size: static; places.

    Returns:
      int32[size] twice; places outside all queries are given to one that does not have so many tokens, or begins later.
    """
    starts = cu_q_lens[:-1]
    marks = jnp.zeros_like(starts, shape=size).at[starts].add(1, **DROP)
    query = jnp.maximum(running_sum(marks) - 1, 0)
    return query, count_up(size) - starts[query]


def of_queries(query: jax.Array, *values: jax.Array) -> jax.Array:
    """Values int32[Q] of the query of each token, int32[values, size]. All are read at once.

    Args:
      query: int32[size], from `token_queries`.
      values: int32[Q] each.
    """
    return jnp.stack(values, axis=1).at[query].get(mode="clip", wrap_negative_indices=False).T

"""Attention over block tables: ragged queries over pages of any layout, in plain XLA.

Queries of several requests lie one after the other, as in JAX's ragged paged attention and in vLLM. Pages are walked
column by column with a running softmax, so that nothing of the size of a context is made; columns that no query of a
row can see, those before a window, are not walked. `reference.paged.ragged_attention` is the definition.
"""

# jax.numpy types some of its own arguments as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from hkv.errors import LayoutError
from hkv.layout.block_layout import Layout
from hkv.layout.content import Part
from hkv.paged.operations import gather
from hkv.typed_jit import Ids, require_array, typed_jit

KEYS, VALUES, LATENT, ROPE = "key", "value", "latent", "rope"
"""Parts of a page that attention reads: keys and values, or latents that are both (MLA), with the rotated elements of
their keys behind them or apart; scales next to a part (`latent_scale`) are of as many of its elements each."""


class _Mask(NamedTuple):
    """Positions that a causal query sees: `attention`'s arguments of the same names."""

    window: jax.Array | None
    chunk: jax.Array | None
    sink_tokens: jax.Array

    def first(self, position: jax.Array) -> jax.Array:
        """The first position that a query sees, sinks apart; elementwise."""
        if self.window is not None:
            return jnp.maximum(position - (self.window - 1), 0)
        if self.chunk is not None:
            return position - position % self.chunk
        return jnp.zeros_like(position)


class _Queries(NamedTuple):
    """Queries `[tokens, kv heads, queries a kv head, elements]`, the row and the position of each; -1 for padding."""

    content: jax.Array
    row: jax.Array
    position: jax.Array


class _Running(NamedTuple):
    """A softmax on its way: the largest score, the sum of exponentials, and the weighted values."""

    largest: jax.Array
    total: jax.Array
    weighted: jax.Array


@typed_jit(static_argnames=("layout", "value_size", "null_block"))
def attention(
    buffer: jax.Array,
    layout: Layout,
    layer: Ids | int,
    query: jax.Array,
    table: Ids,
    cu_q_lens: Ids,
    kv_lens: Ids,
    *,
    window: Ids | int | None = None,
    chunk: Ids | int | None = None,
    sink_tokens: Ids | int = 0,
    scale: jax.Array | float | None = None,
    soft_cap: jax.Array | float | None = None,
    sinks: jax.Array | None = None,
    key_scale: jax.Array | float = 1.0,
    value_scale: jax.Array | float = 1.0,
    value_size: int | None = None,
    null_block: int = 0,
) -> jax.Array:
    """Causal attention of ragged queries over the pages that block tables name.

    The keys and values of the queries' own tokens have to be in the pool. Several query heads share a key head where
    there are more of them (GQA). Pages of latents (MLA) are keys and values of one head: queries are absorbed, and
    `value_size` says how many elements of a latent are its value (vLLM's `kv_lora_rank`).

    Args:
      buffer: the pool's bytes, of any dtype and rank.
      layout: layout of the pool (static).
      layer: int32 scalar, index among the layout's layers.
      query: float `[tokens, query heads, elements]`, the rows' queries one after the other.
      table: int32 `[rows, columns]`, block ids of each row. The null block and -1 read as zeros where they are seen.
      cu_q_lens: int32 `[rows + 1]`, where each row's queries begin, and where the last ones end; never falling, from 0.
        Queries beyond the end are padding.
      kv_lens: int32 `[rows]`, tokens of each row in the pool; its queries are the last of them.
      window: a query sees itself and the `window - 1` tokens before it (vLLM's `sliding_window`), at least 1; None for
        no window.
      chunk: a query sees the tokens of its own chunk of this length (vLLM's `attention_chunk_size`), at least 1; None
        for no chunks, as next to a window.
      sink_tokens: a query sees the first tokens of its request as well, whatever window or chunk say.
      scale: factor of the scores; None for `elements ** -0.5`.
      soft_cap: scores are `soft_cap * tanh(score / soft_cap)`; None for no cap.
      sinks: float `[query heads]`, a score that takes part in the softmax and has no value (gpt-oss); None for none.
      key_scale: factor of the keys in the pool, a number or `[kv heads]`; scales in the pages count besides.
      value_scale: factor of the values, of the same shape.
      value_size: elements of a value (static); None for all that the pages hold.
      null_block: the id that stands for no block (static); -1 where block 0 is a real one.

    Returns:
      `[tokens, query heads, value elements]` of the query's dtype, zeros for padding. Sums are in float32.

    Raises:
      LayoutError: pages without keys and values that can be read as numbers, or arguments of another shape.
    """
    heads, size, values = _sizes(layout, value_size)
    query = require_array("query", query, (None, None, size), float, LayoutError)
    table = require_array("table", table, (None, None), error=LayoutError)
    rows, tokens = table.shape[0], query.shape[0]
    starts = require_array("cu_q_lens", cu_q_lens, (rows + 1,), error=LayoutError)
    lengths = require_array("kv_lens", kv_lens, (rows,), error=LayoutError)
    if query.shape[1] % heads:
        raise LayoutError("query", query.shape[1], f"a multiple of the {heads} key heads")
    if window is not None and chunk is not None:
        raise LayoutError("chunk", "a length", "None beside a window")
    mask = _Mask(
        window=None if window is None else _number(window),
        chunk=None if chunk is None else _number(chunk),
        sink_tokens=_number(sink_tokens),
    )
    shared = query.shape[1] // heads
    factor = jnp.asarray(size**-0.5 if scale is None else scale, jnp.float32)
    content = (query.astype(jnp.float32) * factor).reshape(tokens, heads, shared, size)
    queries = _placed(content, starts, lengths)
    start = _begin(sinks, tokens, heads, shared, values)
    read = (buffer, query, table, starts, lengths, key_scale, value_scale, 0 if sinks is None else sinks)
    start = jax.tree.map(lambda part: part + _zero(*read), start)
    columns = _Columns.of(mask, starts, lengths, layout.states_per_block, table.shape[1])

    def one(step: jax.Array, running: _Running) -> _Running:
        column, walked = columns.at(step)
        blocks = jnp.take_along_axis(table, column[:, None], axis=1)[:, 0]
        found, _ = gather(buffer, layout, layer, jnp.where(walked, blocks, -1), null_block=null_block)
        keys, contents = _read(found, layout, rows, key_scale, value_scale, values)
        seen = _seen(queries, mask, column, walked, layout.states_per_block)
        return _more(running, queries, keys, contents, seen, soft_cap)

    running = jax.lax.fori_loop(0, columns.most, one, start)
    found = running.weighted / jnp.where(running.total == 0, 1, running.total)[..., None]
    found = jnp.where((queries.row >= 0)[:, None, None, None], found, 0)
    return found.reshape(tokens, heads * shared, values).astype(query.dtype)


def _sizes(layout: Layout, value_size: int | None) -> tuple[int, int, int]:
    """Key heads, elements of a key and of a value."""
    parts = {part.name: part for part in layout.content}
    rope = parts.get(ROPE)
    if LATENT in parts and _are_numbers(parts) and set(parts) <= {LATENT, ROPE, f"{LATENT}_scale"}:
        heads, (most,) = 1, parts[LATENT].shape
        size = most + (0 if rope is None else rope.shape[0])
    elif {KEYS, VALUES} <= set(parts) and _are_numbers({name: parts[name] for name in (KEYS, VALUES)}):
        heads = parts[KEYS].heads or layout.shape[2]
        (size,), (most,) = parts[KEYS].shape, parts[VALUES].shape
    else:
        held = ", ".join(f"{name} ({part.dtype})" for name, part in parts.items())
        raise LayoutError(
            "layout", held, f"{KEYS} and {VALUES}, or {LATENT} (and {ROPE}), in a dtype that is a number each"
        )
    values = int(most) if value_size is None else value_size
    if not 1 <= values <= most:
        raise LayoutError("value_size", values, f"from 1 to the {most} elements in the pages")
    return heads, size, values


def _are_numbers(parts: Mapping[str, Part]) -> bool:
    return all(part.dtype != "uint8" for part in parts.values())


def _number(length: jax.Array | int) -> jax.Array:
    return jnp.asarray(length, jnp.int32)


def _placed(content: jax.Array, starts: jax.Array, lengths: jax.Array) -> _Queries:
    tokens, rows = content.shape[0], lengths.shape[0]
    index = jnp.arange(tokens, dtype=jnp.int32)
    row = jnp.searchsorted(starts, index, side="right").astype(jnp.int32) - 1
    there = (row >= 0) & (row < rows)
    row = jnp.where(there, row, 0)
    position = index - starts[row + 1] + lengths[row]
    return _Queries(content, jnp.where(there, row, -1), jnp.where(there, position, -1))


def _begin(sinks: jax.Array | None, tokens: int, heads: int, shared: int, values: int) -> _Running:
    shape = (tokens, heads, shared)
    if sinks is None:
        largest, total = jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.float32)
    else:
        sinks = require_array("sinks", sinks, (heads * shared,), float, LayoutError)
        largest = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(heads, shared), shape)
        total = jnp.ones(shape, jnp.float32)
    return _Running(largest, total, jnp.zeros((*shape, values), jnp.float32))


def _zero(*read: jax.Array | float) -> jax.Array:
    """0, varying over all mesh axes that any value varies over, as a loop's carry has to inside `jax.shard_map`."""
    firsts = (jnp.asarray(value).reshape(-1)[:1] for value in read)
    return sum((jnp.zeros_like(first, jnp.float32).sum() for first in firsts), start=jnp.float32(0))


@dataclasses.dataclass(frozen=True)
class _Columns:
    """Columns of each row that any of its queries sees: first those of the sinks, then from `first` to `end`.

    `first`, `end`: int32 `[rows]`; `most`: int32, the most columns of a row; `limit`: columns of the table.
    """

    sinks: jax.Array
    first: jax.Array
    end: jax.Array
    most: jax.Array
    limit: int

    @classmethod
    def of(cls, mask: _Mask, starts: jax.Array, lengths: jax.Array, block: int, limit: int) -> _Columns:
        asked = starts[1:] - starts[:-1]
        end = jnp.where(asked > 0, jnp.minimum(-(-lengths // block), limit), 0)
        first = jnp.minimum(mask.first(jnp.maximum(lengths - asked, 0)) // block, end)
        sinks = jnp.minimum(-(-mask.sink_tokens // block), first)
        return cls(sinks, first, end, jnp.max(sinks + end - first, initial=0), limit)

    def at(self, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Column of each row in a step, and whether there is one."""
        column = jnp.where(step < self.sinks, step, self.first + step - self.sinks)
        return jnp.clip(column, 0, max(self.limit - 1, 0)), column < self.end


def _read(
    found: dict[str, jax.Array],
    layout: Layout,
    rows: int,
    key_scale: jax.Array | float,
    value_scale: jax.Array | float,
    values: int,
) -> tuple[jax.Array, jax.Array]:
    """Keys and values of one block a row, float32 `[rows, states, heads, elements]`."""

    def numbers(name: str, factor: jax.Array | float) -> jax.Array:
        content = found[name].astype(jnp.float32)
        if (scales := found.get(f"{name}_scale")) is not None:
            content = content * jnp.repeat(scales.astype(jnp.float32), content.shape[-1] // scales.shape[-1], axis=-1)
        factor = jnp.asarray(factor, jnp.float32)
        content = content * (factor[:, None] if factor.ndim else factor)
        return content.reshape(rows, layout.states_per_block, *content.shape[1:])

    if LATENT in found:
        names = (LATENT, ROPE) if ROPE in found else (LATENT,)
        keys = jnp.concatenate([numbers(name, key_scale) for name in names], axis=-1)
        return keys, numbers(LATENT, value_scale)[..., :values]
    return numbers(KEYS, key_scale), numbers(VALUES, value_scale)[..., :values]


def _seen(queries: _Queries, mask: _Mask, column: jax.Array, walked: jax.Array, block: int) -> jax.Array:
    """True where a query sees a state of its row's block, `[tokens, states]`."""
    row = jnp.maximum(queries.row, 0)
    state = column[row][:, None] * block + jnp.arange(block, dtype=jnp.int32)
    position = queries.position[:, None]
    read = (state >= mask.first(position)) | (state < mask.sink_tokens)
    return read & (state <= position) & walked[row][:, None] & (queries.row >= 0)[:, None]


def _more(
    running: _Running,
    queries: _Queries,
    keys: jax.Array,
    values: jax.Array,
    seen: jax.Array,
    soft_cap: jax.Array | float | None,
) -> _Running:
    """The softmax over one more block of each row. What is not seen may be anything, NaN too."""
    row = jnp.maximum(queries.row, 0)
    precision = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("thgd,tshd->thgs", queries.content, keys[row], precision=precision)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen[:, None, None, :], scores, -jnp.inf)
    largest = jnp.maximum(running.largest, scores.max(axis=-1))
    basis = jnp.where(largest == -jnp.inf, 0, largest)
    weights = jnp.exp(scores - basis[..., None])
    kept = jnp.exp(running.largest - basis)
    contents = jnp.where(seen[..., None, None], values[row], 0)
    weighted = jnp.einsum("thgs,tshv->thgv", weights, contents, precision=precision)
    return _Running(largest, running.total * kept + weights.sum(axis=-1), running.weighted * kept[..., None] + weighted)

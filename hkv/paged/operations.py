"""Write, gather, scatter, copy and zero, on a pool of any layout. Jitted; the pool is donated and changed in place.

A pool is a buffer of any dtype and rank, best of flat unsigned words, and its `Layout`, a static value. Block ids and
states that do not exist move nothing and are counted; -1 is no id at all: it moves nothing and is not counted.

A pool is bits, so no derivative passes it: `write` and `scatter` refuse values that are differentiated, and what
`gather` finds is a constant.
"""

# jax.numpy types some of its own arguments as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from hkv.errors import LayoutError
from hkv.layout.block_layout import Layout
from hkv.layout.content import Part
from hkv.layout.strided import StridedView
from hkv.layout.views.jax import without_derivative
from hkv.layout.views.numpy import numpy_dtype
from hkv.layout.views.runs import Runs, from_words, to_words
from hkv.paged import plan
from hkv.paged.implementations import AUTO, choose, implementation_of_moves
from hkv.paged.words import as_words, like, runs_of_pool
from hkv.typed_jit import Ids, require_array, require_whole, typed_jit

Values = Mapping[str, jax.Array]
"""Parts of a layout's content by name (`key`, `value`, `key_scale`, ...)."""


Views = Mapping[str, tuple[StridedView, int]]
"""Views of a pool by name, each with how many of its leading axes say which unit."""

CELL = "cell"
"""Name under which all parts of a token, or of a block, are moved as one."""


def kernel_blocks(layout: Layout) -> Layout:
    """The same bytes with every kernel block a block of its own: ids are then those of kernel tables."""
    return dataclasses.replace(layout, num_blocks=layout.shape[1], split=1, kernel_step=1)


@typed_jit(static_argnames=("layout", "implementation"), donate_argnames="buffer")
def write(
    buffer: jax.Array,
    layout: Layout,
    layer: Ids | int,
    blocks: Ids,
    states: Ids,
    values: Values,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """New keys and values, one state a token, at their slots.

    Args:
      buffer: the pool's bytes, of any dtype and rank, donated.
      layout: layout of the pool (static).
      layer: int32 scalar, index among the layout's layers.
      blocks: int32 `[tokens]`, block of each token's slot; -1 for padding, which writes nothing. No slot twice.
      states: int32 `[tokens]`, state within the block.
      values: per part, `[tokens, heads, *part.shape]` of the part's dtype. Parts that are not given stay as they are.
      implementation: name of the code that moves the bytes (static); None for the best on this device.

    Returns:
      The buffer, and how many slots did not exist (int32).

    Raises:
      LayoutError: a part that the layout has not; slots or values of another shape or dtype; values with a derivative.
    """
    values = _constants(values)
    blocks, states = _ids("blocks", blocks), _ids("states", states, blocks.shape[0])
    for name, content in values.items():
        part = layout.part(name)
        _check_values(name, content, (blocks.shape[0], _heads(layout, part), *part.shape), part.dtype)
    pieces, within = states // layout.shape[3], states % layout.shape[3]
    _, dtype, runs_by_part = _written_as(buffer, layout, tuple(values), implementation)
    contents = [values[name] for name in runs_by_part] if CELL not in runs_by_part else [_cells(layout, values, dtype)]
    moves, sources = [], []
    for content, runs in zip(contents, runs_by_part.values(), strict=True):
        starts, _ = runs.start_rows(layer, blocks, pieces, within)
        moves.append(plan.move_of(runs, len(sources), 0, written=starts))
        sources.append(to_words(content, runs, dtype).reshape(-1))
    (words,) = choose(implementation).move_runs(sources, [as_words(buffer, dtype)], moves)
    exists = _inside(layer, layout.shape[0]) & _inside(blocks, layout.num_blocks)
    exists &= _inside(states, layout.states_per_block)
    return like(words, buffer), _count((blocks != -1) & ~exists)


@typed_jit(static_argnames=("layout", "parts", "null_block", "implementation"))
def gather(
    buffer: jax.Array,
    layout: Layout,
    layer: Ids | int,
    table: Ids,
    parts: tuple[str, ...] | None = None,
    null_block: int = 0,
    implementation: str | None = None,
) -> tuple[dict[str, jax.Array], jax.Array]:
    """The states of the blocks that a block table names, one after the other.

    Args:
      buffer: the pool's bytes, of any dtype and rank.
      layout: layout of the pool (static).
      layer: int32 scalar.
      table: int32 `[blocks]`, block ids in order. The null block, -1 and ids that do not exist read as zeros.
      parts: names of the parts wanted (static); None for all.
      null_block: the id that stands for no block (static); -1 where block 0 is a real one.
      implementation: as in `write`.

    Returns:
      Per part `[blocks * states in a block, heads, *part.shape]`, and how many ids did not exist (int32).
    """
    table = _ids("table", table)
    shown = jnp.where(table == null_block, -1, table)
    names = parts or tuple(part.name for part in layout.content)
    dtype, found = runs_of_pool(buffer, [(plan.part_view(layout, name), plan.BLOCK) for name in names])
    moves, targets = [], []
    for runs in found:
        starts, _ = runs.start_rows(layer, shown)
        moves.append(plan.move_of(runs, 0, len(targets), read=starts, zeros=True))
        targets.append(jax.ShapeDtypeStruct((moves[-1].runs * runs.length,), dtype))
    words = choose(implementation).move_runs([as_words(buffer, dtype)], targets, moves)
    exists = _inside(layer, layout.shape[0]) & _inside(table, layout.num_blocks)
    contents = [_of_blocks(layout, name, array, table.shape[0]) for name, array in zip(names, words, strict=True)]
    return dict(zip(names, contents, strict=True)), _count((table != -1) & ~exists)


@typed_jit(static_argnames=("layout", "null_block", "implementation"), donate_argnames="buffer")
def scatter(
    buffer: jax.Array,
    layout: Layout,
    layer: Ids | int,
    table: Ids,
    values: Values,
    null_block: int = 0,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The inverse of `gather`: whole blocks from contiguous states.

    Args:
      buffer: the pool's bytes, of any dtype and rank, donated.
      layout: layout of the pool (static).
      layer: int32 scalar.
      table: int32 `[blocks]`; the null block, -1 and ids that do not exist are skipped. No id twice.
      values: per part `[blocks * states in a block, heads, *part.shape]`.
      null_block: as in `gather`.
      implementation: as in `write`.

    Returns:
      The buffer, and how many ids did not exist (int32).

    Raises:
      LayoutError: as `write`.
    """
    values, table = _constants(values), _ids("table", table)
    shown = jnp.where(table == null_block, -1, table)
    dtype, found = runs_of_pool(buffer, [(plan.part_view(layout, name), plan.BLOCK) for name in values])
    moves, sources = [], []
    for (name, content), runs in zip(values.items(), found, strict=True):
        part = layout.part(name)
        shape = (layout.states_per_block, _heads(layout, part), *part.shape)
        _check_values(name, content, (table.shape[0] * shape[0], *shape[1:]), part.dtype)
        starts, _ = runs.start_rows(layer, shown)
        moves.append(plan.move_of(runs, len(sources), 0, written=starts))
        sources.append(to_words(content.reshape(table.shape[0], *shape), runs, dtype).reshape(-1))
    (words,) = choose(implementation).move_runs(sources, [as_words(buffer, dtype)], moves)
    exists = _inside(layer, layout.shape[0]) & _inside(table, layout.num_blocks)
    return like(words, buffer), _count((table != -1) & ~exists)


@typed_jit(static_argnames=("layout", "implementation", "disjoint"), donate_argnames="buffer")
def copy_blocks(
    buffer: jax.Array,
    layout: Layout,
    sources: Ids,
    targets: Ids,
    implementation: str | None = None,
    disjoint: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Copies blocks, in every layer: all sources are read before anything is written, so lists may overlap.

    Args:
      buffer: the pool's bytes, of any dtype and rank, donated.
      layout: layout of the pool (static).
      sources: int32 `[copies]`.
      targets: int32 `[copies]`; none twice. A pair with a -1 copies nothing.
      implementation: as in `write`; with `disjoint`, None is `auto`: one pass of a kernel takes half the time of XLA
        with its two.
      disjoint: the caller's word that no block is a source and a target (static): kernels then move each byte once, and
        what is copied is undefined if it is not so.

    Returns:
      The buffer, and how many pairs named a block that does not exist (int32).
    """
    sources, targets = _ids("sources", sources), _ids("targets", targets, sources.shape[0])
    padding = (sources == -1) | (targets == -1)
    exist = _inside(sources, layout.num_blocks) & _inside(targets, layout.num_blocks)
    dtype, (runs,) = runs_of_pool(buffer, [(plan.whole_blocks(layout), 1)])
    words, code = as_words(buffer, dtype), choose(implementation or (AUTO if disjoint else None))
    read, written = (runs.start_rows(jnp.where(exist, ids, -1))[0] for ids in (sources, targets))
    if disjoint:
        (words,) = code.move_runs([], [words], [plan.move_of(runs, None, 0, read, written, own=True)])
        return like(words, buffer), _count(~padding & ~exist)
    reading = plan.move_of(runs, 0, 0, read=read, zeros=True)
    (held,) = code.move_runs([words], [jax.ShapeDtypeStruct((reading.runs * runs.length,), dtype)], [reading])
    # Fused into the scatter, the gather would read the pool while it is written, and XLA would copy all of it first.
    # As rows, which the scatter takes: XLA's CPU compiler copies a flat pool between the two.
    held, rows = jax.lax.optimization_barrier((held, runs.rows(words)))
    (words,) = code.move_runs([held], [rows.reshape(-1)], [plan.move_of(runs, 0, 0, written=written)])
    return like(words, buffer), _count(~padding & ~exist)


@typed_jit(static_argnames=("layout", "implementation"), donate_argnames="buffer")
def zero_blocks(
    buffer: jax.Array, layout: Layout, blocks: Ids, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Zeros every byte of some blocks that carries data, in every layer; padding stays.

    Args:
      buffer: the pool's bytes, of any dtype and rank, donated.
      layout: layout of the pool (static).
      blocks: int32 `[blocks]`; -1 zeros nothing. Unlike targets of a copy, an id may be there twice.
      implementation: as in `write`.

    Returns:
      The buffer, and how many ids did not exist (int32).
    """
    blocks = _ids("blocks", blocks)
    dtype, (runs,) = runs_of_pool(buffer, [(plan.whole_blocks(layout), 1)])
    # Implementations take no run twice: of equal ids, which lie side by side once sorted, the first alone is moved.
    ordered = jnp.sort(blocks)
    again = jnp.concatenate([jnp.zeros(1, bool), ordered[1:] == ordered[:-1]])[: ordered.shape[0]]
    starts, _ = runs.start_rows(jnp.where(again, -1, ordered))
    zeros = plan.move_of(runs, None, 0, written=starts)
    (words,) = choose(implementation).move_runs([], [as_words(buffer, dtype)], [zeros])
    return like(words, buffer), _count((blocks != -1) & ~_inside(blocks, layout.num_blocks))


def implementations_of(
    buffer: jax.Array | jax.ShapeDtypeStruct, layout: Layout, implementation: str | None = None
) -> dict[str, dict[str, str]]:
    """Implementations that move the bytes of each operation, on the device that the program is traced for.

    Args:
      buffer: the pool's bytes, of any dtype and rank, or its shape and dtype.
      layout: layout of the pool.
      implementation: as in `write`.

    Returns:
      Per operation, the implementation's name by part; `cell` where all parts move as one.

    Raises:
      ConfigError: an operation would refuse the implementation, on this device or for these runs.
      LayoutError: the pool does not fit the layout.
    """

    names = tuple(part.name for part in layout.content)
    written, _, _ = _written_as(buffer, layout, names, implementation)
    blocks = _chosen(buffer, {name: (plan.part_view(layout, name), plan.BLOCK) for name in names}, implementation)
    cells = _chosen(buffer, {CELL: (plan.whole_blocks(layout), 1)}, implementation)
    return {
        "write": written,
        "gather": blocks,
        "scatter": dict(blocks),
        "copy_blocks": cells,
        "zero_blocks": dict(cells),
    }


def _chosen(buffer: jax.Array | jax.ShapeDtypeStruct, views: Views, implementation: str | None) -> dict[str, str]:
    """Implementations that move the runs of each view."""
    dtype, found = runs_of_pool(buffer, list(views.values()))
    pool = jax.ShapeDtypeStruct((math.prod(buffer.shape) * np.dtype(buffer.dtype).itemsize // dtype.itemsize,), dtype)
    return {
        name: implementation_of_moves(implementation, [pool], [runs.row], [runs.length], bool(runs.page))
        for name, runs in zip(views, found, strict=True)
    }


def _written_as(
    buffer: jax.Array | jax.ShapeDtypeStruct, layout: Layout, names: tuple[str, ...], implementation: str | None
) -> tuple[dict[str, str], np.dtype, dict[str, Runs]]:
    """Implementation, words and runs of each part of tokens to write; `cell` where all parts go as one.

    XLA joins the parts of a token as it writes them. A kernel takes each from where it is, in one launch.
    """
    views: Views = {name: (plan.part_view(layout, name), plan.TOKEN) for name in names}
    chosen = _chosen(buffer, views, implementation)
    together = plan.parts_of_cell(layout)
    if set(chosen.values()) == {"xla"} and len(names) == len(together):
        views = {CELL: (plan.cell_view(layout), plan.TOKEN)}
        chosen = _chosen(buffer, views, implementation)
    dtype, found = runs_of_pool(buffer, list(views.values()))
    return chosen, dtype, dict(zip(views, found, strict=True))


def _cells(layout: Layout, values: Values, dtype: np.dtype) -> jax.Array:
    """All parts of each token's cells, one after the other."""
    return plan.joined([values[part.name] for part in plan.parts_of_cell(layout)], dtype)


def _of_blocks(layout: Layout, name: str, words: jax.Array, count: int) -> jax.Array:
    """Words of a part of `count` blocks as `[states, heads, *shape]` of its dtype."""
    part = layout.part(name)
    shape = (layout.states_per_block, _heads(layout, part), *part.shape)
    dtype = numpy_dtype(part.dtype)
    width = math.prod(shape) * dtype.itemsize // words.dtype.itemsize
    return from_words(words.reshape(count, width), shape, dtype).reshape(count * shape[0], *shape[1:])


def _constants(values: Values) -> Values:
    found = {}
    for name, content in values.items():
        argument = f"values[{name!r}]"
        found[name] = require_whole(argument, without_derivative(argument, content), LayoutError)
    return found


def _ids(name: str, ids: jax.Array, count: int | None = None) -> jax.Array:
    return require_array(name, ids, (count,), error=LayoutError)


def _inside(index: jax.Array | int, extent: int) -> jax.Array:
    return (jnp.asarray(index) >= 0) & (index < extent)


def _count(flags: jax.Array) -> jax.Array:
    return jnp.sum(flags, dtype=jnp.int32)


def _heads(layout: Layout, part: Part) -> int:
    return layout.shape[2] if part.heads is None else part.heads


def _check_values(name: str, content: jax.Array, shape: tuple[int, ...], dtype: str) -> None:
    if tuple(content.shape) != shape or content.dtype != numpy_dtype(dtype):
        raise LayoutError(f"values[{name!r}]", f"{content.dtype}{list(content.shape)}", f"{dtype}{list(shape)}")

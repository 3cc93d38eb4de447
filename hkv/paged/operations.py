"""Write, gather, scatter, copy and zero, on a pool of any layout. Jitted; the pool is donated and changed in place.

A pool is a flat buffer of bytes or wider unsigned words, and its `Layout`, a static value. Block ids and states that do
not exist move nothing and are counted; -1 is no id at all: it moves nothing and is not counted.

A pool is bits, so no derivative passes it: `write` and `scatter` refuse values that are differentiated, and what
`gather` finds is a constant.
"""

# jax.numpy types some of its own arguments as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from hkv.array_arguments import require_array
from hkv.errors import LayoutError
from hkv.layout.block_layout import Layout
from hkv.layout.content import Part
from hkv.layout.strided import StridedView
from hkv.layout.views.derivatives import without_derivative
from hkv.layout.views.numpy import numpy_dtype
from hkv.layout.views.runs import from_words, runs_of, to_words
from hkv.paged.implementations import choose, implementation_for
from hkv.typed_jit import typed_jit

Values = Mapping[str, jax.Array]
"""Parts of a layout's content by name (`key`, `value`, `key_scale`, ...)."""


def kernel_blocks(layout: Layout) -> Layout:
    """The same bytes with every kernel block a block of its own: ids are then those of kernel tables."""
    return dataclasses.replace(layout, num_blocks=layout.shape[1], split=1, kernel_step=1)


@typed_jit(static_argnames=("layout", "implementation"), donate_argnames="buffer")
def write(
    buffer: jax.Array,
    layout: Layout,
    layer: jax.Array | int,
    blocks: jax.Array,
    states: jax.Array,
    values: Values,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """New keys and values, one state a token, at their slots.

    Args:
      buffer: unsigned words `[size]`: the pool, donated.
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
    pieces, within = states // layout.shape[3], states % layout.shape[3]
    for name, view, content in _parts_to_write(layout, values, lead=1):
        runs = runs_of(buffer, _with_states_third(view), 4)
        starts, _ = runs.start_rows(layer, blocks, pieces, within)
        rows = buffer.reshape(-1, runs.row)
        del name
        buffer = choose(implementation).scatter(rows, starts, to_words(content, runs, buffer.dtype)).reshape(-1)
    exists = _inside(layer, layout.shape[0]) & _inside(blocks, layout.num_blocks)
    exists &= _inside(states, layout.states_per_block)
    return buffer, _count((blocks != -1) & ~exists)


@typed_jit(static_argnames=("layout", "parts", "null_block", "implementation"))
def gather(
    buffer: jax.Array,
    layout: Layout,
    layer: jax.Array | int,
    table: jax.Array,
    parts: tuple[str, ...] | None = None,
    null_block: int = 0,
    implementation: str | None = None,
) -> tuple[dict[str, jax.Array], jax.Array]:
    """The states of the blocks that a block table names, one after the other.

    Args:
      buffer: unsigned words `[size]`: the pool.
      layout: layout of the pool (static).
      layer: int32 scalar.
      table: int32 `[blocks]`, block ids in order. The null block, -1 and ids that do not exist read as zeros.
      parts: names of the parts wanted (static); None for all.
      null_block: the id that stands for no block (static); -1 where block 0 is a real one.
      implementation: as in `write`.

    Returns:
      Per part `[blocks * states in a block, heads, *part.shape]`, and how many ids did not exist (int32).
    """
    found, table = {}, _ids("table", table)
    shown = jnp.where(table == null_block, -1, table)
    for name in parts or tuple(part.name for part in layout.content):
        part, view = layout.part(name), _block_view(layout, name)
        runs = runs_of(buffer, view, 2)
        starts, _ = runs.start_rows(layer, shown)
        words = choose(implementation).gather(buffer.reshape(-1, runs.row), starts, runs.rows_per_run)
        shape = (layout.states_per_block, _heads(layout, part), *part.shape)
        whole = from_words(words, shape, numpy_dtype(part.dtype))
        found[name] = whole.reshape(-1, *shape[1:])
    exists = _inside(layer, layout.shape[0]) & _inside(table, layout.num_blocks)
    return found, _count((table != -1) & ~exists)


@typed_jit(static_argnames=("layout", "null_block", "implementation"), donate_argnames="buffer")
def scatter(
    buffer: jax.Array,
    layout: Layout,
    layer: jax.Array | int,
    table: jax.Array,
    values: Values,
    null_block: int = 0,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The inverse of `gather`: whole blocks from contiguous states.

    Args:
      buffer: unsigned words `[size]`: the pool, donated.
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
    for name, content in values.items():
        part, view = layout.part(name), _block_view(layout, name)
        shape = (layout.states_per_block, _heads(layout, part), *part.shape)
        _check_values(name, content, (table.shape[0] * shape[0], *shape[1:]), part.dtype)
        runs = runs_of(buffer, view, 2)
        starts, _ = runs.start_rows(layer, shown)
        words = to_words(content.reshape(table.shape[0], *shape), runs, buffer.dtype)
        buffer = choose(implementation).scatter(buffer.reshape(-1, runs.row), starts, words).reshape(-1)
    exists = _inside(layer, layout.shape[0]) & _inside(table, layout.num_blocks)
    return buffer, _count((table != -1) & ~exists)


@typed_jit(static_argnames=("layout", "implementation"), donate_argnames="buffer")
def copy_blocks(
    buffer: jax.Array,
    layout: Layout,
    sources: jax.Array,
    targets: jax.Array,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Copies blocks, in every layer: all sources are read before anything is written, so lists may overlap.

    Args:
      buffer: unsigned words `[size]`: the pool, donated.
      layout: layout of the pool (static).
      sources: int32 `[copies]`.
      targets: int32 `[copies]`; none twice. A pair with a -1 copies nothing.
      implementation: as in `write`.

    Returns:
      The buffer, and how many pairs named a block that does not exist (int32).
    """
    sources, targets = _ids("sources", sources), _ids("targets", targets, sources.shape[0])
    padding = (sources == -1) | (targets == -1)
    exist = _inside(sources, layout.num_blocks) & _inside(targets, layout.num_blocks)
    runs = runs_of(buffer, layout.cells(), 2)
    layers = jnp.arange(layout.shape[0], dtype=jnp.int32)[:, None]
    read, _ = runs.start_rows(layers, jnp.where(exist, sources, -1)[None])
    written, _ = runs.start_rows(layers, jnp.where(exist, targets, -1)[None])
    rows = buffer.reshape(-1, runs.row)
    code = choose(implementation)
    words = code.gather(rows, read.reshape(-1, len(runs.starts)), runs.rows_per_run)
    # Fused into the scatter, the gather would read the pool while it is written, and XLA would copy all of it first.
    words, rows = jax.lax.optimization_barrier((words, rows))
    rows = code.scatter(rows, written.reshape(-1, len(runs.starts)), words)
    return rows.reshape(-1), _count(~padding & ~exist)


@typed_jit(static_argnames=("layout", "implementation"), donate_argnames="buffer")
def zero_blocks(
    buffer: jax.Array, layout: Layout, blocks: jax.Array, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Zeros every byte of some blocks that carries data, in every layer; padding stays.

    Args:
      buffer: unsigned words `[size]`: the pool, donated.
      layout: layout of the pool (static).
      blocks: int32 `[blocks]`; -1 zeros nothing. Unlike targets of a copy, an id may be there twice.
      implementation: as in `write`.

    Returns:
      The buffer, and how many ids did not exist (int32).
    """
    blocks = _ids("blocks", blocks)
    runs = runs_of(buffer, layout.cells(), 2)
    layers = jnp.arange(layout.shape[0], dtype=jnp.int32)[:, None]
    # Implementations take no run twice: of equal ids, which lie side by side once sorted, the first alone is moved.
    ordered = jnp.sort(blocks)
    again = jnp.concatenate([jnp.zeros(1, bool), ordered[1:] == ordered[:-1]])[: ordered.shape[0]]
    starts, _ = runs.start_rows(layers, jnp.where(again, -1, ordered)[None])
    starts = starts.reshape(-1, len(runs.starts))
    zeros = jnp.zeros((*starts.shape, runs.rows_per_run, runs.row), buffer.dtype)
    rows = choose(implementation).scatter(buffer.reshape(-1, runs.row), starts, zeros)
    return rows.reshape(-1), _count((blocks != -1) & ~_inside(blocks, layout.num_blocks))


def implementations_of(
    buffer: jax.Array | jax.ShapeDtypeStruct, layout: Layout, implementation: str | None = None
) -> dict[str, dict[str, str]]:
    """Implementations that move the bytes of each operation, on the device that the program is traced for.

    Args:
      buffer: unsigned words `[size]`: the pool, or its shape and dtype.
      layout: layout of the pool.
      implementation: as in `write`.

    Returns:
      Per operation, the implementation's name by part; `cell` where all parts move as one.

    Raises:
      ConfigError: an operation would refuse the implementation, on this device or for these runs.
      LayoutError: the pool does not fit the layout.
    """

    def chosen(view: StridedView, num_coordinates: int) -> str:
        runs = runs_of(buffer, view, num_coordinates)
        rows = jax.ShapeDtypeStruct((buffer.size // runs.row, runs.row), buffer.dtype)
        return implementation_for(implementation, rows, runs.rows_per_run)

    names = [part.name for part in layout.content]
    tokens = {"cell": layout.cells()} if _cell_order(layout) else {name: layout.part_cells(name) for name in names}
    blocks = {name: chosen(_block_view(layout, name), 2) for name in names}
    cells = {"cell": chosen(layout.cells(), 2)}
    return {
        "write": {name: chosen(_with_states_third(view), 4) for name, view in tokens.items()},
        "gather": blocks,
        "scatter": dict(blocks),
        "copy_blocks": cells,
        "zero_blocks": dict(cells),
    }


def _constants(values: Values) -> Values:
    return {name: without_derivative(f"values[{name!r}]", content) for name, content in values.items()}


def _ids(name: str, ids: jax.Array, count: int | None = None) -> jax.Array:
    return require_array(name, ids, (count,), error=LayoutError)


def _inside(index: jax.Array | int, extent: int) -> jax.Array:
    return (jnp.asarray(index) >= 0) & (index < extent)


def _count(flags: jax.Array) -> jax.Array:
    return jnp.sum(flags, dtype=jnp.int32)


def _heads(layout: Layout, part: Part) -> int:
    return layout.shape[2] if part.heads is None else part.heads


def _with_states_third(view: StridedView) -> StridedView:
    """`[layers, blocks, pieces, heads, states, ...]` with states before heads: one token is the last axes."""
    order = (0, 1, 2, 4, 3, *range(5, len(view.shape)))
    return StridedView(
        tuple(view.shape[a] for a in order), tuple(view.strides[a] for a in order), view.offset, view.dtype
    )


def _block_view(layout: Layout, name: str) -> StridedView:
    return _with_states_third(layout.part_cells(name))


def _parts_to_write(layout: Layout, values: Values, lead: int) -> list[tuple[str, StridedView, jax.Array]]:
    """Parts to write, with their views and values: all parts of a cell at once if all are given and fill it, else each
    alone."""
    for name, content in values.items():
        part = layout.part(name)
        _check_values(name, content, (*content.shape[:lead], _heads(layout, part), *part.shape), part.dtype)
    together = _cell_order(layout)
    if together and len(values) == len(together):
        cells = [_as_bytes(values[part.name], lead + 1) for part in together]
        return [("cell", layout.cells(), jnp.concatenate(cells, axis=-1))]
    return [(name, layout.part_cells(name), content) for name, content in values.items()]


def _cell_order(layout: Layout) -> list[Part]:
    """The parts of a cell as they lie, if they fill it and there are no others; else none."""
    in_cells = [part for part in layout.content if part.strides is None and part.heads is None]
    together = sorted(in_cells, key=lambda part: part.offset)
    fill = sum(part.nbytes for part in together) == layout.shape[4]
    return together if fill and len(together) == len(layout.content) else []


def _as_bytes(values: jax.Array, lead: int) -> jax.Array:
    """`[..., bytes]` of an array `[..., *shape]` whose first `lead` axes stay."""
    flat = values.reshape(*values.shape[:lead], -1)
    return jax.lax.bitcast_convert_type(flat, np.uint8).reshape(*flat.shape[:lead], -1)


def _check_values(name: str, content: jax.Array, shape: tuple[int, ...], dtype: str) -> None:
    if tuple(content.shape) != shape or content.dtype != numpy_dtype(dtype):
        raise LayoutError(f"values[{name!r}]", f"{content.dtype}{list(content.shape)}", f"{dtype}{list(shape)}")

"""Views of a pool that each operation moves, in the order of memory where order is free."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from hkv.layout.block_layout import Layout
from hkv.layout.content import Part
from hkv.layout.strided import StridedView
from hkv.layout.views.runs import Runs
from pallas_kernels.move.moves import Move

TOKEN, BLOCK = 4, 2
"""Leading axes that name a token's slot `(layer, block, piece, state)`, or a block `(layer, block)`."""


def move_of(
    runs: Runs,
    source: int | None,
    target: int,
    read: jax.Array | None = None,
    written: jax.Array | None = None,
    zeros: bool = False,
    own: bool = False,
) -> Move:
    """Runs of units of a pool as a `Move`; the tables are as `Runs.start_rows` gives them."""
    shape = (-1, 2) if runs.page else (-1,)
    read, written = (None if starts is None else starts.reshape(shape) for starts in (read, written))
    count = next(starts.shape[0] for starts in (read, written) if starts is not None)
    return Move(source, target, read, written, count, runs.row, runs.length, zeros, own, runs.page)


def with_states_third(view: StridedView) -> StridedView:
    """`[layers, blocks, pieces, heads, states, ...]` with states before heads: one token is the last axes."""
    return view.reordered((0, 1, 2, 4, 3, *range(5, len(view.shape))))


def part_view(layout: Layout, name: str) -> StridedView:
    """One part of every token: `[layers, blocks, pieces, states, heads, *shape]`."""
    return with_states_third(layout.part_cells(name))


def cell_view(layout: Layout) -> StridedView:
    """Every byte of every token: `[layers, blocks, pieces, states, heads, content]`."""
    return with_states_third(layout.cells())


def whole_blocks(layout: Layout) -> StridedView:
    """Every byte of a block in all layers, `[blocks, ...]`, the axes of a block in the order in which they lie.

    Neither a copy nor zeroing asks in which order bytes come, so axes that adjoin in memory become one run, layers too.
    """
    cells = layout.cells()
    inner = sorted((axis for axis in range(len(cells.shape)) if axis != 1), key=lambda axis: -cells.strides[axis])
    # Axes of one element say nothing of where they lie.
    inner.sort(key=lambda axis: cells.shape[axis] > 1)
    return cells.reordered((1, *inner))


def parts_of_cell(layout: Layout) -> list[Part]:
    """The parts of a cell as they lie, if they fill it and there are no others; else none."""
    in_cells = [part for part in layout.content if part.strides is None and part.heads is None]
    together = sorted(in_cells, key=lambda part: part.offset)
    fill = sum(part.nbytes for part in together) == layout.shape[4]
    return together if fill and len(together) == len(layout.content) else []


def joined(parts: Sequence[jax.Array], dtype: np.dtype) -> jax.Array:
    """Parts `[n, heads, *shape]` of a cell, one after the other for each head, in words of at most `dtype`'s width."""
    widths = [math.prod(array.shape[2:]) * array.dtype.itemsize for array in parts]
    word = next(w for w in (4, 2, 1) if w <= dtype.itemsize and all(width % w == 0 for width in widths))
    return jnp.concatenate([_flat_words(array, np.dtype(f"uint{8 * word}")) for array in parts], axis=-1)


def _flat_words(array: jax.Array, dtype: np.dtype) -> jax.Array:
    """`[n, heads, words]` of an array `[n, heads, ...]`."""
    own, word, lead = array.dtype.itemsize, dtype.itemsize, array.shape[:2]
    width = math.prod(array.shape[2:]) * own // word
    shape = (*lead, width, word // own) if own < word else (*lead, width * word // own)
    return jax.lax.bitcast_convert_type(array.reshape(shape), dtype).reshape(*lead, width)

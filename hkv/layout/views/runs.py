"""Runs: the gapless stretches of a pool that make up one token or one block, as rows of the reshaped buffer.

A pool is one flat buffer of unsigned words. Reshaped to `[rows, row]`, which is a bitcast, it is moved run by run: a
run starts at a row and is a whole number of rows long. What a token or a block consists of is static; where it is, not.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hkv.errors import LayoutError
from hkv.layout.strided import StridedView

ROW_LIMIT = 2**31 - 1
"""Rows that a 32-bit index can name. A row is as wide as the layout allows, so pools far beyond 2 GiB fit; runs of
pools of more rows are found by page and row in it."""


@dataclasses.dataclass(frozen=True)
class Runs:
    """Runs of words that make up one unit (a token, or a block) of the pool. Static; counts are in words, or in rows.

    Attributes:
      row: words in a row.
      length: words in a run.
      num_rows: rows of the buffer.
      first: row of the unit whose every coordinate is 0.
      steps: rows from one unit to the next, along each coordinate.
      extents: number of units along each coordinate.
      starts: row of each run within a unit, in the order of the unit's own axes.
      page: rows of a page, which no run crosses, in buffers of more than `ROW_LIMIT` rows; 0 in others.
    """

    row: int
    length: int
    num_rows: int
    first: int
    steps: tuple[int, ...]
    extents: tuple[int, ...]
    starts: tuple[int, ...]
    page: int = 0

    @property
    def rows_per_run(self) -> int:
        """Rows in a run."""
        return self.length // self.row

    @property
    def words(self) -> int:
        """Words of one unit."""
        return self.length * len(self.starts)

    def rows(self, buffer: jax.Array) -> jax.Array:
        """The buffer as `[rows, row]`, or `[pages, page, row]` where runs are found by page."""
        return buffer.reshape(-1, self.page, self.row) if self.page else buffer.reshape(-1, self.row)

    def start_rows(self, *coordinates: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """Row of every run of some units.

        Args:
          *coordinates: int32, of shapes that broadcast to `[n]`, one for each of `steps`.

        Returns:
          int32 `[n, runs]`, past the buffer's end for units that do not exist, or `[n, runs, 2]`, page and row in it,
          where there are pages; and bool `[n]`, whether they do.
        """
        whole = self.page or 2 * self.num_rows  # without pages all of it is the row in the first
        inside = jnp.asarray(True)
        page, row = (jnp.asarray(number, jnp.int32) for number in divmod(self.first, whole))
        for coordinate, step, extent in zip(coordinates, self.steps, self.extents, strict=True):
            here = (coordinate >= 0) & (coordinate < extent)
            if step % whole or not step:
                row = row + jnp.where(here, coordinate, 0) * np.int32(step)
            else:
                page = page + jnp.where(here, coordinate, 0) * np.int32(step // whole)
            inside = inside & here
        found = row[..., None] + np.asarray(self.starts, np.int32)
        if not self.page:
            return jnp.where(inside[..., None], found, np.int32(self.num_rows)), inside
        pages = jnp.where(inside, page, np.int32(self.num_rows // self.page))
        return jnp.stack(jnp.broadcast_arrays(pages[..., None], found), axis=-1), inside


def runs_of(buffer: jax.Array | jax.ShapeDtypeStruct, view: StridedView, num_coordinates: int) -> Runs:
    """The runs of the units that the first `num_coordinates` axes of a view count.

    `buffer` is the whole pool, unsigned words `[size]`, or its shape and dtype. LayoutError for words that do not
    divide every stride, and for too many rows.
    """
    if buffer.ndim != 1 or not jnp.issubdtype(buffer.dtype, jnp.unsignedinteger):
        raise LayoutError("buffer", f"{buffer.dtype}{list(buffer.shape)}", "one axis of unsigned words")
    word = np.dtype(buffer.dtype).itemsize
    size = buffer.size * word
    view.check_fits(size)
    inner = StridedView(view.shape[num_coordinates:], view.strides[num_coordinates:], 0, view.dtype)
    gapless, length = _trailing_run(inner)
    outer = [axis for axis in range(len(inner.shape)) if axis not in gapless and inner.shape[axis] > 1]
    steps = view.strides[:num_coordinates]
    used = [step for step, extent in zip(steps, view.shape, strict=False) if extent > 1]
    row = math.gcd(size, view.offset, length, *used, *(inner.strides[axis] for axis in outer))
    if row % word:
        expected = f"a size of whole rows: words that divide rows of {row} bytes"
        raise LayoutError("buffer", f"{buffer.dtype}{list(buffer.shape)}", expected)
    indices = itertools.product(*(range(inner.shape[axis]) for axis in outer))
    starts = [sum(i * inner.strides[axis] for i, axis in zip(index, outer, strict=True)) for index in indices]
    runs = Runs(
        row=row // word,
        length=length // word,
        num_rows=size // row,
        first=view.offset // row,
        steps=tuple(step // row if extent > 1 else 0 for step, extent in zip(steps, view.shape, strict=False)),
        extents=view.shape[:num_coordinates],
        starts=tuple(start // row for start in starts),
    )
    return runs if runs.num_rows <= ROW_LIMIT else dataclasses.replace(runs, page=_page(buffer, runs))


def _page(buffer: jax.Array | jax.ShapeDtypeStruct, runs: Runs) -> int:
    """Rows of the smallest page that runs can be found by: a step that divides the larger ones and the buffer."""
    steps = [(step, extent) for step, extent in zip(runs.steps, runs.extents, strict=True) if step]
    for page in sorted({step for step, _ in steps}):
        within = [(step, extent) for step, extent in steps if step % page]
        end = runs.first % page + sum(step * (extent - 1) for step, extent in within)
        end += max(runs.starts) + runs.rows_per_run
        if runs.num_rows % page == 0 and end <= page <= ROW_LIMIT and runs.num_rows // page < ROW_LIMIT:
            return page
    expected = f"at most {ROW_LIMIT} rows of {runs.row} words, or a size of whole blocks of at most as many"
    raise LayoutError("buffer", f"{buffer.dtype}{list(buffer.shape)}", expected)


def _trailing_run(view: StridedView) -> tuple[set[int], int]:
    """Axes, from the last, that lie gapless in their own order, and the bytes of such a run.

    Unlike `StridedView.run_axes` it keeps the order of the axes, so that values need no transposition.
    """
    axes: set[int] = set()
    length = view.itemsize
    for axis in range(len(view.shape) - 1, -1, -1):
        if view.shape[axis] > 1 and view.strides[axis] != length:
            break
        axes.add(axis)
        length *= view.shape[axis]
    return axes, length


def to_words(values: jax.Array, runs: Runs, dtype: np.dtype) -> jax.Array:
    """Values `[n, ...]` of any dtype as words `[n, runs, rows of a run, row]`, bits unchanged."""
    flat = values.reshape(values.shape[0], math.prod(values.shape[1:]))
    item, word = flat.dtype.itemsize, np.dtype(dtype).itemsize
    if item < word:
        flat = flat.reshape(flat.shape[0], flat.shape[1] * item // word, word // item)
    words = jax.lax.bitcast_convert_type(flat, dtype)
    return words.reshape(flat.shape[0], len(runs.starts), runs.rows_per_run, runs.row)


def from_words(words: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """The inverse of `to_words`: words of `n` units as `[n, *shape]` of `dtype`."""
    count = words.shape[0]
    item, word = np.dtype(dtype).itemsize, words.dtype.itemsize
    flat = words.reshape(count, math.prod(words.shape[1:]))
    if item > word:
        flat = flat.reshape(count, flat.shape[1] * word // item, item // word)
    return jax.lax.bitcast_convert_type(flat, dtype).reshape(count, *shape)


# Moving runs by XLA's gather and scatter.


def gather_runs(pools: Sequence[jax.Array], starts: jax.Array, rows_per_run: int) -> jax.Array:
    """Runs of several pools of one shape; zeros for those that start outside.

    Args:
      pools: words of any dtype `[rows, row]` each, or `[pages, page, row]`.
      starts: int32 `[pools, n, runs]`, first row of each run, or `[pools, n, runs, 2]`, its page and first row in it.
      rows_per_run: static.

    Returns:
      `[pools, n, runs, rows_per_run, row]`.
    """
    leading, numbers = _numbers(pools[0], starts)
    dimensions = lax.GatherDimensionNumbers((2, 3), collapsed_slice_dims=leading[:-1], start_index_map=leading)
    found = [
        lax.gather(
            pool,
            numbers[index],
            dimensions,
            slice_sizes=(*(1 for _ in leading[:-1]), rows_per_run, pool.shape[-1]),
            mode=lax.GatherScatterMode.FILL_OR_DROP,
            fill_value=0,
        )
        for index, pool in enumerate(pools)
    ]
    return found[0][None] if len(found) == 1 else jnp.stack(found)


def scatter_runs(pools: Sequence[jax.Array], starts: jax.Array, values: jax.Array) -> tuple[jax.Array, ...]:
    """Several pools of one shape with some runs replaced, in place where donated.

    Args:
      pools: as in `gather_runs`.
      starts: as in `gather_runs`; runs that start outside are dropped, and no two inside one pool overlap.
      values: `[pools, n, runs, rows_per_run, row]` of the same dtype.
    """
    leading, numbers = _numbers(pools[0], starts)
    dimensions = lax.ScatterDimensionNumbers((2, 3), leading[:-1], scatter_dims_to_operand_dims=leading)
    last = pools[0].shape[len(leading) - 1] - values.shape[3]
    # Unless told that indices are unique, XLA compiles a GPU's scatter of bytes to one compare-and-swap a byte.
    return tuple(
        lax.scatter(
            pool,
            _distinct(numbers[index], pool.shape[0], last),
            values[index],
            dimensions,
            unique_indices=True,
            mode=lax.GatherScatterMode.FILL_OR_DROP,
        )
        for index, pool in enumerate(pools)
    )


def _numbers(pool: jax.Array, starts: jax.Array) -> tuple[tuple[int, ...], jax.Array]:
    """Axes of a pool that starts name, and starts with an axis of as many numbers."""
    leading = tuple(range(pool.ndim - 1))
    return leading, starts if len(leading) > 1 else starts[..., None]


def _distinct(numbers: jax.Array, pages: int, last: int) -> jax.Array:
    """As `distinct_starts`, of starts with an axis for their numbers."""
    if numbers.shape[-1] == 1:
        return distinct_starts(numbers[..., 0], last)[..., None]
    page, row = numbers[..., 0], numbers[..., 1]
    missing = (page < 0) | (page >= pages)
    return jnp.stack([page, distinct_starts(jnp.where(missing, -1, row), last)], axis=-1)


def distinct_starts(starts: jax.Array, last: int) -> jax.Array:
    """Starts, of any shape, no two equal: those of runs that are dropped become distinct negative numbers.

    `last` is the last row that a run can start at; no two starts inside are equal.
    """
    # Negative, because numbers past the end of a pool of nearly 2**31 rows would wrap around into it.
    outside = -1 - jnp.arange(starts.size, dtype=jnp.int32).reshape(starts.shape)
    return jnp.where((starts >= 0) & (starts <= last), starts, outside)

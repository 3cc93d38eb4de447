"""Strided views in JAX: blocks move through bitcasts of the flat buffer, so that no pool is ever copied.

JAX arrays are dense. To scatter into a transposed pool, XLA copies the whole pool; to scatter bfloat16 on the CPU, JAX
0.10 makes it float32 and back. So the pool stays one flat buffer of bytes or words that is only ever reshaped to rows,
a bitcast. The blocks that move are gathered or scattered as rows, and transposed and retyped when they are small. All
movement is of unsigned words, so that NaN payloads survive.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hkv.errors import LayoutError
from hkv.layout.strided import StridedView
from hkv.layout.views.derivatives import without_derivative
from hkv.layout.views.numpy import numpy_dtype

ROW_LIMIT = 2**31 - 1
"""Rows that a 32-bit index can name. A row is as wide as the layout allows, so pools far beyond 2 GiB fit."""


def read_blocks(buffer: jax.Array, strided: StridedView, blocks: jax.Array) -> jax.Array:
    """Some blocks of a layer, in logical order.

    Args:
      buffer: uint8 or wider unsigned words `[size]`: the whole pool.
      strided: a view whose axis 0 counts blocks, such as `Layout.layer_view` or `Layout.part_view`; static.
      blocks: int32 `[n]`, rows of axis 0. A row outside of the view reads zeros; negative rows do not wrap.

    Returns:
      `[n, *strided.shape[1:]]` of the view's dtype.

    Raises:
      LayoutError: the buffer is not flat, too short, or of words wider than an element.
    """
    plan = _plan(buffer, strided)
    rows = lax.gather(
        buffer.reshape(-1, plan.row),
        plan.first_rows(blocks),
        lax.GatherDimensionNumbers(offset_dims=(2, 3), collapsed_slice_dims=(), start_index_map=(0,)),
        slice_sizes=(plan.run // plan.row, plan.row),
        mode=lax.GatherScatterMode.FILL_OR_DROP,
        fill_value=0,
    )
    words = rows.reshape(-1, *plan.sizes, plan.item).transpose(plan.to_logical)
    words = words.reshape(blocks.shape[0], *strided.shape[1:], plan.item)
    return lax.bitcast_convert_type(words if plan.item > 1 else words[..., 0], numpy_dtype(strided.dtype))


def write_blocks(buffer: jax.Array, strided: StridedView, blocks: jax.Array, values: jax.Array) -> jax.Array:
    """The buffer with some blocks of a layer replaced; in place when the caller's `jit` donates it.

    Args:
      buffer: uint8 or wider unsigned words `[size]`: the whole pool.
      strided: as in `read_blocks`; static.
      blocks: int32 `[n]`, rows of axis 0, each at most once. Rows outside of the view are dropped.
      values: `[n, *strided.shape[1:]]` of the view's dtype; bits are kept as they are.

    Returns:
      A buffer of the same shape and dtype; bytes that are not the blocks' (padding, other layers) are unchanged.

    Raises:
      LayoutError: as `read_blocks`, values of another shape or dtype, or values with a derivative.
    """
    plan = _plan(buffer, strided)
    expected = (blocks.shape[0], *strided.shape[1:])
    if values.shape != expected or values.dtype != numpy_dtype(strided.dtype):
        raise LayoutError("values", f"{values.dtype}{list(values.shape)}", f"{strided.dtype}{list(expected)}")
    constants = without_derivative("values", values)
    words = lax.bitcast_convert_type(constants, buffer.dtype).reshape(-1, *plan.logical_sizes, plan.item)
    updates = words.transpose(plan.to_physical).reshape(-1, len(plan.starts), plan.run // plan.row, plan.row)
    starts = plan.first_rows(blocks)
    # Unless told that indices are unique, XLA compiles a GPU's scatter of bytes to one compare-and-swap a byte. So rows
    # that are dropped must differ, too: negative ones, which cannot wrap around into a pool of nearly 2**31 rows.
    dropped = -1 - np.arange(starts.size, dtype=np.int32).reshape(starts.shape)
    rows = lax.scatter(
        buffer.reshape(-1, plan.row),
        jnp.where(starts < plan.num_rows, starts, dropped),
        updates,
        lax.ScatterDimensionNumbers((2, 3), inserted_window_dims=(), scatter_dims_to_operand_dims=(0,)),
        unique_indices=True,
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )
    return rows.reshape(buffer.shape)


def read(buffer: jax.Array, strided: StridedView) -> jax.Array:
    """The whole view in logical order: an array of its own, of `strided.shape`."""
    return read_blocks(buffer, strided, jnp.arange(strided.shape[0], dtype=jnp.int32))


def write(buffer: jax.Array, strided: StridedView, values: jax.Array) -> jax.Array:
    """The buffer with the whole view replaced by `values`, which is of `strided.shape`."""
    return write_blocks(buffer, strided, jnp.arange(strided.shape[0], dtype=jnp.int32), values)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How to move the blocks of a view as rows of the buffer. All counts are in words of the buffer.

    Attributes:
      row: words in a row of the reshaped buffer.
      run: words that lie without a gap inside a block.
      num_rows: rows of the buffer.
      num_blocks: blocks of the view.
      step: rows from one block to the next.
      starts: row of each run of block 0, in the physical order of the axes outside of a run.
      axes: axes of the view but axis 0 with more than one element, in physical order.
      shape: extents of the view.
      item: words in one element.
    """

    row: int
    run: int
    num_rows: int
    num_blocks: int
    step: int
    starts: tuple[int, ...]
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    item: int

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.shape[axis] for axis in self.axes)

    @property
    def logical_sizes(self) -> tuple[int, ...]:
        return tuple(self.shape[axis] for axis in sorted(self.axes))

    @property
    def to_logical(self) -> tuple[int, ...]:
        return (0, *(1 + self.axes.index(axis) for axis in sorted(self.axes)), 1 + len(self.axes))

    @property
    def to_physical(self) -> tuple[int, ...]:
        logical = sorted(self.axes)
        return (0, *(1 + logical.index(axis) for axis in self.axes), 1 + len(self.axes))

    def first_rows(self, blocks: jax.Array) -> jax.Array:
        """First row of each run of each block: int32 `[n, runs, 1]`; past the end for blocks that are not there."""
        inside = (blocks >= 0) & (blocks < self.num_blocks)
        rows = jnp.where(inside, blocks, 0)[:, None] * self.step + np.asarray(self.starts, np.int32)
        return jnp.where(inside[:, None], rows, self.num_rows)[..., None]


def _plan(buffer: jax.Array, strided: StridedView) -> _Plan:
    word = np.dtype(buffer.dtype).itemsize
    if buffer.ndim != 1 or not jnp.issubdtype(buffer.dtype, jnp.unsignedinteger) or strided.itemsize % word:
        expected = f"one axis of unsigned words of at most {strided.itemsize} bytes"
        raise LayoutError("buffer", f"{buffer.dtype}{list(buffer.shape)}", expected)
    if strided.dtype == "bool" or strided.itemsize > 4:
        raise LayoutError("dtype", strided.dtype, "a number of at most 32 bits, as JAX holds by default")
    strided.check_fits(buffer.size * word)
    block = StridedView(strided.shape[1:], strided.strides[1:], 0, strided.dtype)
    inside, run = block.run_axes()
    axes = sorted((a for a, n in enumerate(block.shape) if n > 1), key=lambda a: block.strides[a], reverse=True)
    outer = [a for a in axes if a not in inside]
    steps = [block.strides[a] for a in outer]
    row = math.gcd(buffer.size * word, strided.offset, strided.strides[0], run, *steps)
    num_rows = buffer.size * word // max(row, 1)
    if row % word or num_rows > ROW_LIMIT:
        expected = f"a size of whole rows: {row} bytes divide it and every stride, which makes {num_rows} rows"
        raise LayoutError("buffer", buffer.size * word, expected)
    indices = itertools.product(*(range(block.shape[a]) for a in outer))
    starts = tuple((strided.offset + sum(i * s for i, s in zip(index, steps, strict=True))) // row for index in indices)
    return _Plan(
        row=row // word,
        run=run // word,
        num_rows=num_rows,
        num_blocks=strided.shape[0],
        step=strided.strides[0] // row,
        starts=starts,
        axes=tuple(a + 1 for a in axes),
        shape=strided.shape,
        item=strided.itemsize // word,
    )

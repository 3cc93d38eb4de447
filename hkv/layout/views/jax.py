"""Strided views in JAX: blocks move through bitcasts of the flat buffer, so that no pool is ever copied.

JAX arrays are dense. To scatter into a transposed pool, XLA copies the whole pool; to scatter bfloat16 on the CPU, JAX
0.10 makes it float32 and back. So the pool stays one flat buffer of bytes or words that is only ever reshaped to rows,
a bitcast. The blocks that move are gathered or scattered as rows, and transposed and retyped when they are small. All
movement is of unsigned words, so that NaN payloads survive.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from hkv.errors import LayoutError
from hkv.layout.strided import StridedView
from hkv.layout.views.numpy import numpy_dtype
from hkv.layout.views.runs import Runs, from_words, gather_runs, runs_of, scatter_runs, to_words


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
    runs, physical = _runs(buffer, strided)
    starts, _ = runs.start_rows(blocks)
    words = gather_runs([runs.rows(buffer)], starts[None], runs.rows_per_run)[0]
    elements = from_words(words, tuple(strided.shape[axis] for axis in physical), _unsigned(strided))
    logical = elements.transpose(0, *(1 + physical.index(axis) for axis in range(1, len(strided.shape))))
    return lax.bitcast_convert_type(logical, numpy_dtype(strided.dtype))


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
    runs, physical = _runs(buffer, strided)
    expected = (blocks.shape[0], *strided.shape[1:])
    if values.shape != expected or values.dtype != numpy_dtype(strided.dtype):
        raise LayoutError("values", f"{values.dtype}{list(values.shape)}", f"{strided.dtype}{list(expected)}")
    elements = lax.bitcast_convert_type(without_derivative("values", values), _unsigned(strided))
    words = to_words(elements.transpose(0, *physical), runs, buffer.dtype)
    starts, _ = runs.start_rows(blocks)
    return scatter_runs([runs.rows(buffer)], starts[None], words[None])[0].reshape(buffer.shape)


def read(buffer: jax.Array, strided: StridedView) -> jax.Array:
    """The whole view in logical order: an array of its own, of `strided.shape`."""
    return read_blocks(buffer, strided, jnp.arange(strided.shape[0], dtype=jnp.int32))


def write(buffer: jax.Array, strided: StridedView, values: jax.Array) -> jax.Array:
    """The buffer with the whole view replaced by `values`, which is of `strided.shape`."""
    return write_blocks(buffer, strided, jnp.arange(strided.shape[0], dtype=jnp.int32), values)


def _unsigned(strided: StridedView) -> np.dtype:
    return np.dtype(f"uint{8 * strided.itemsize}")


def _runs(buffer: jax.Array, strided: StridedView) -> tuple[Runs, tuple[int, ...]]:
    """The runs of a block, and the axes of the view but axis 0 in the order in which they lie."""
    word = np.dtype(buffer.dtype).itemsize
    if buffer.ndim != 1 or not jnp.issubdtype(buffer.dtype, jnp.unsignedinteger) or strided.itemsize % word:
        expected = f"one axis of unsigned words of at most {strided.itemsize} bytes"
        raise LayoutError("buffer", f"{buffer.dtype}{list(buffer.shape)}", expected)
    if strided.dtype == "bool" or strided.itemsize > 4:
        raise LayoutError("dtype", strided.dtype, "a number of at most 32 bits, as JAX holds by default")
    physical = tuple(sorted(range(1, len(strided.shape)), key=lambda axis: strided.strides[axis], reverse=True))
    return runs_of(buffer, strided.reordered((0, *physical)), 1), physical


# Refusing derivatives where values become bits: JAX's own for a bitcast to an integer is 0, without a word.


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def without_derivative(argument: str, values: jax.Array) -> jax.Array:
    """The values themselves, named `argument` by the caller, which nothing may be differentiated through."""
    del argument
    return values


@functools.partial(without_derivative.defjvp, symbolic_zeros=True)
def _refuse(argument: str, primals: tuple[jax.Array], tangents: tuple[Any]) -> tuple[jax.Array, Any]:
    (values,), (tangent,) = primals, tangents
    if not isinstance(tangent, SymbolicZero):
        given = f"{values.dtype}{list(values.shape)}, differentiated"
        expected = "no derivative, for they become bits and it would be 0: jax.lax.stop_gradient makes them constants"
        raise LayoutError(argument, given, expected)
    return values, tangent

"""Scatter by Pallas on Triton, in place, for GPUs before Hopper; see `pallas_kernels.gather.pallas_triton`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.triton_tiles import NUM_WARPS, Tiles, tiles_of


def _kernel(
    starts_ref: Any, values_ref: Any, pool_in_ref: Any, pool_ref: Any, *, tiles: Tiles, row: int, num_rows: int
) -> None:
    del pool_in_ref  # the same memory as pool_ref
    run, line, tile = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    start = starts_ref[run]
    columns = tile * tiles.width + jnp.arange(tiles.width)
    mask = columns < row

    @pl.when((start >= 0) & (start < num_rows))
    def _() -> None:
        words = plt.load(values_ref.at[run, line, columns], mask=mask, other=0)
        plt.store(pool_ref.at[start + line, columns], words, mask=mask)


def scatter_runs(rows: jax.Array, starts: jax.Array, values: jax.Array, *, interpret: bool = False) -> jax.Array:
    """The pool with some runs replaced, in place when it is donated; runs that start outside of it are dropped.

    Args:
      rows: words of any dtype `[rows, row]`.
      starts: int32 `[n, runs]`, first row of each run; no two runs inside the pool overlap.
      values: `[n, runs, rows of a run, row]` of the same dtype.
      interpret: run on the CPU, slowly, as the kernel would (static).
    """
    count, runs, rows_per_run, row = values.shape
    if 0 in values.shape:
        return rows
    tiles = tiles_of(row, rows.dtype.itemsize)
    call = pl.pallas_call(
        functools.partial(_kernel, tiles=tiles, row=row, num_rows=rows.shape[0] - rows_per_run + 1),
        out_shape=jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        grid=(count * runs, rows_per_run, tiles.count),
        input_output_aliases={2: 0},
        compiler_params=plt.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=interpret,
        name="scatter_runs",
    )
    return call(starts.reshape(-1), values.reshape(count * runs, rows_per_run, row), rows)

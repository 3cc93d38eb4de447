"""Gather by Pallas on Triton, for GPUs before Hopper. JAX 0.11 deprecates the backend: its warning is filtered."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.triton_tiles import NUM_WARPS, Tiles, tiles_of


def _kernel(starts_ref: Any, pool_ref: Any, out_ref: Any, *, tiles: Tiles, row: int, num_rows: int) -> None:
    run, line, tile = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    start = starts_ref[run]
    inside = (start >= 0) & (start < num_rows)
    columns = tile * tiles.width + jnp.arange(tiles.width)
    mask = columns < row
    source = jnp.where(inside, start + line, 0)
    words = plt.load(pool_ref.at[source, columns], mask=mask & inside, other=0)
    plt.store(out_ref.at[run, line, columns], words, mask=mask)


def gather_runs(rows: jax.Array, starts: jax.Array, rows_per_run: int, *, interpret: bool = False) -> jax.Array:
    """Runs of a pool; zeros for those that start outside of it.

    Args:
      rows: words of any dtype `[rows, row]`.
      starts: int32 `[n, runs]`, first row of each run.
      rows_per_run: static.
      interpret: run on the CPU, slowly, as the kernel would (static).

    Returns:
      `[n, runs, rows_per_run, row]`.
    """
    count, runs = starts.shape
    num_rows, row = rows.shape
    shape = (count, runs, rows_per_run, row)
    if 0 in shape:
        return jnp.zeros(shape, rows.dtype)
    tiles = tiles_of(row, rows.dtype.itemsize)
    call = pl.pallas_call(
        functools.partial(_kernel, tiles=tiles, row=row, num_rows=num_rows - rows_per_run + 1),
        out_shape=jax.ShapeDtypeStruct((count * runs, rows_per_run, row), rows.dtype),
        grid=(count * runs, rows_per_run, tiles.count),
        compiler_params=plt.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=interpret,
        name="gather_runs",
    )
    return call(starts.reshape(-1), rows).reshape(shape)

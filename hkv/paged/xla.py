"""Gathering and scattering runs by plain XLA: the implementation that every device has."""

from __future__ import annotations

import jax
from jax import lax


def gather_runs(rows: jax.Array, starts: jax.Array, rows_per_run: int) -> jax.Array:
    """Runs of a pool; zeros for those that start past its end.

    Args:
      rows: unsigned words `[rows, row]`.
      starts: int32 `[n, runs]`, first row of each run.
      rows_per_run: static.

    Returns:
      `[n, runs, rows_per_run, row]`.
    """
    return lax.gather(
        rows,
        starts[..., None],
        lax.GatherDimensionNumbers(offset_dims=(2, 3), collapsed_slice_dims=(), start_index_map=(0,)),
        slice_sizes=(rows_per_run, rows.shape[1]),
        mode=lax.GatherScatterMode.FILL_OR_DROP,
        fill_value=0,
    )


def scatter_runs(rows: jax.Array, starts: jax.Array, values: jax.Array) -> jax.Array:
    """The pool with some runs replaced, in place when it is donated; runs that start past its end are dropped.

    Args:
      rows: unsigned words `[rows, row]`.
      starts: int32 `[n, runs]`, first row of each run; no two runs inside the pool overlap.
      values: `[n, runs, rows_per_run, row]`.
    """
    return lax.scatter(
        rows,
        starts[..., None],
        values,
        lax.ScatterDimensionNumbers((2, 3), inserted_window_dims=(), scatter_dims_to_operand_dims=(0,)),
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )

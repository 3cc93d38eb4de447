"""Gathering and scattering runs by plain XLA: the implementation that every device has."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax


def gather_runs(pools: Sequence[jax.Array], starts: jax.Array, rows_per_run: int) -> jax.Array:
    """Runs of several pools of one shape; zeros for those that start outside.

    Args:
      pools: words of any dtype `[rows, row]` each.
      starts: int32 `[pools, n, runs]`, first row of each run.
      rows_per_run: static.

    Returns:
      `[pools, n, runs, rows_per_run, row]`.
    """
    dimensions = lax.GatherDimensionNumbers(offset_dims=(2, 3), collapsed_slice_dims=(), start_index_map=(0,))
    found = [
        lax.gather(
            pool,
            starts[index][..., None],
            dimensions,
            slice_sizes=(rows_per_run, pool.shape[1]),
            mode=lax.GatherScatterMode.FILL_OR_DROP,
            fill_value=0,
        )
        for index, pool in enumerate(pools)
    ]
    return found[0][None] if len(found) == 1 else jnp.stack(found)


def scatter_runs(pools: Sequence[jax.Array], starts: jax.Array, values: jax.Array) -> tuple[jax.Array, ...]:
    """Several pools of one shape with some runs replaced, in place where donated.

    Args:
      pools: words of any dtype `[rows, row]` each.
      starts: int32 `[pools, n, runs]`, first row of each run; runs that start outside are dropped, and no two inside
        one pool overlap.
      values: `[pools, n, runs, rows_per_run, row]` of the same dtype.
    """
    dimensions = lax.ScatterDimensionNumbers((2, 3), inserted_window_dims=(), scatter_dims_to_operand_dims=(0,))
    last = pools[0].shape[0] - values.shape[3]
    # Unless told that indices are unique, XLA compiles a GPU's scatter of bytes to one compare-and-swap a byte.
    return tuple(
        lax.scatter(
            pool,
            distinct_starts(starts[index], last)[..., None],
            values[index],
            dimensions,
            unique_indices=True,
            mode=lax.GatherScatterMode.FILL_OR_DROP,
        )
        for index, pool in enumerate(pools)
    )


def distinct_starts(starts: jax.Array, last: int) -> jax.Array:
    """Starts such that no two are equal: those of runs that are dropped become distinct negative numbers.

    Args:
      starts: int32 of any shape, first rows of runs; no two inside are equal.
      last: last row that a run can start at.
    """
    # Negative, because numbers past the end of a pool of nearly 2**31 rows would wrap around into it.
    outside = -1 - jnp.arange(starts.size, dtype=jnp.int32).reshape(starts.shape)
    return jnp.where((starts >= 0) & (starts <= last), starts, outside)

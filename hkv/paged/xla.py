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
    mode = lax.GatherScatterMode.FILL_OR_DROP
    return tuple(
        lax.scatter(pool, starts[index][..., None], values[index], dimensions, mode=mode)
        for index, pool in enumerate(pools)
    )

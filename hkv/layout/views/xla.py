"""Gathering and scattering runs by plain XLA: the implementation that every device has."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax


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
    """Starts such that no two are equal: those of runs that are dropped become distinct negative numbers.

    Args:
      starts: int32 of any shape, first rows of runs; no two inside are equal.
      last: last row that a run can start at.
    """
    # Negative, because numbers past the end of a pool of nearly 2**31 rows would wrap around into it.
    outside = -1 - jnp.arange(starts.size, dtype=jnp.int32).reshape(starts.shape)
    return jnp.where((starts >= 0) & (starts <= last), starts, outside)

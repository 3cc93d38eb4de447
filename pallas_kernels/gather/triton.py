"""Gather by Triton itself, through jax-triton (an optional extra); a launch for each pool."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import jax_triton_call
from pallas_kernels.triton_tiles import NUM_WARPS, tiles_of

jax_triton_call.load()

from pallas_kernels.triton_source import gather_kernel  # noqa: E402


def gather_runs(pools: Sequence[jax.Array], starts: jax.Array, rows_per_run: int) -> jax.Array:
    """Runs of several pools of one shape; zeros for those that start outside.

    Args:
      pools: words of any dtype `[rows, row]` each.
      starts: int32 `[pools, n, runs]`, first row of each run.
      rows_per_run: static.

    Returns:
      `[pools, n, runs, rows_per_run, row]`.
    """
    (num_rows, row), dtype = pools[0].shape, pools[0].dtype
    shape = (*starts.shape, rows_per_run, row)
    if 0 in shape:
        return jnp.zeros(shape, dtype)
    runs, length = starts.shape[1] * starts.shape[2], rows_per_run * row
    tiles = tiles_of(length, dtype.itemsize)
    found = [
        jax_triton_call.call(
            gather_kernel,
            starts[index].reshape(-1),
            pool,
            out=jax.ShapeDtypeStruct((runs, length), dtype),
            grid=(runs, tiles.count),
            num_warps=NUM_WARPS,
            last=num_rows - rows_per_run,
            row=row,
            length=length,
            width=tiles.width,
        )
        for index, pool in enumerate(pools)
    ]
    return jnp.stack(found).reshape(shape)

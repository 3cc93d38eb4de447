"""Scatter by Triton itself, in place, through jax-triton (an optional extra); a launch for each pool."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from pallas_kernels import jax_triton_call
from pallas_kernels.triton_tiles import NUM_WARPS, tiles_of

jax_triton_call.load()

from pallas_kernels.triton_source import scatter_kernel, scatter_kernel_of_two_pointers  # noqa: E402


def scatter_runs(pools: Sequence[jax.Array], starts: jax.Array, values: jax.Array) -> tuple[jax.Array, ...]:
    """Several pools of one shape with some runs replaced, in place where donated.

    Args:
      pools: words of any dtype `[rows, row]` each.
      starts: int32 `[pools, n, runs]`, first row of each run; runs that start outside are dropped, and no two inside
        one pool overlap.
      values: `[pools, n, runs, rows of a run, row]` of the same dtype.
    """
    if 0 in values.shape:
        return tuple(pools)
    num_rows, row = pools[0].shape
    runs, length = starts.shape[1] * starts.shape[2], values.shape[3] * row
    tiles = tiles_of(length, pools[0].dtype.itemsize)
    kernel = scatter_kernel_of_two_pointers if jax_triton_call.two_pointers() else scatter_kernel
    return tuple(
        jax_triton_call.call(
            kernel,
            starts[index].reshape(-1),
            values[index].reshape(runs, length),
            pool,
            out=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
            grid=(runs, tiles.count),
            input_output_aliases={2: 0},
            num_warps=NUM_WARPS,
            last=num_rows - values.shape[3],
            row=row,
            length=length,
            width=tiles.width,
        )
        for index, pool in enumerate(pools)
    )

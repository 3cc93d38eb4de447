"""Scatter by Pallas on Triton, in place; see `pallas_kernels.gather.pallas_triton`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.gather.pallas_triton import place_in
from pallas_kernels.triton_tiles import MAX_POOLS, MAX_TILES, NUM_WARPS, Tiles, check_addressable, tiles_of


def _kernel(starts_ref: Any, values_ref: Any, *refs: Any, tiles: Tiles, length: int, last: int) -> None:
    pool_refs = refs[len(refs) // 2 :]  # the first half are the same memory, as inputs
    run, tile, pool = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    start = starts_ref[pool, run]
    columns = tile * tiles.width + jnp.arange(tiles.width)
    mask = columns < length

    def move(pool_ref: Any) -> None:
        words = plt.load(values_ref.at[pool, run, columns], mask=mask, other=0)
        plt.store(pool_ref.at[place_in(pool_ref.shape[1], length, start, columns)], words, mask=mask)

    for index, pool_ref in enumerate(pool_refs):
        pl.when((pool == index) & (start >= 0) & (start <= last))(functools.partial(move, pool_ref))


def scatter_runs(
    pools: Sequence[jax.Array], starts: jax.Array, values: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, ...]:
    """Several pools of one shape with some runs replaced, MAX_POOLS in a launch, in place where donated.

    Args:
      pools: words of any dtype `[rows, row]` each.
      starts: int32 `[pools, n, runs]`, first row of each run; runs that start outside are dropped, and no two inside
        one pool overlap.
      values: `[pools, n, runs, rows of a run, row]` of the same dtype.
      interpret: run on the CPU, slowly, as the kernel would (static).
    """
    if 0 in values.shape:
        return tuple(pools)
    if len(pools) > MAX_POOLS:
        parts = [slice(first, first + MAX_POOLS) for first in range(0, len(pools), MAX_POOLS)]
        written = [scatter_runs(pools[part], starts[part], values[part], interpret=interpret) for part in parts]
        return tuple(pool for some in written for pool in some)
    num_rows, row = pools[0].shape
    length, runs = values.shape[3] * row, starts.shape[1] * starts.shape[2]
    tiles = tiles_of(length, pools[0].dtype.itemsize)
    if tiles.count > MAX_TILES:
        raise ValueError(f"runs of {length} words: expected at most {MAX_TILES * tiles.width}")
    check_addressable(pools[0], values)
    call = pl.pallas_call(
        functools.partial(_kernel, tiles=tiles, length=length, last=num_rows - values.shape[3]),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
        grid=(runs, tiles.count, len(pools)),
        input_output_aliases={2 + index: index for index in range(len(pools))},
        compiler_params=plt.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=interpret,
        name="scatter_runs",
    )
    return tuple(call(starts.reshape(len(pools), runs), values.reshape(len(pools), runs, length), *pools))

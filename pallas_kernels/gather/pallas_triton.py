"""Gather by Pallas on Triton, for GPUs before Hopper, and for rows that no bulk copy can move.

JAX 0.11 deprecates the backend and warns when it is lowered, which is why it is kept apart.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.triton_tiles import MAX_POOLS, MAX_TILES, NUM_WARPS, Tiles, check_addressable, tiles_of


def _kernel(starts_ref: Any, *refs: Any, tiles: Tiles, length: int, last: int) -> None:
    *pool_refs, out_ref = refs
    run, tile, pool = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    start = starts_ref[pool, run]
    inside = (start >= 0) & (start <= last)
    columns = tile * tiles.width + jnp.arange(tiles.width)
    mask = columns < length

    def move(pool_ref: Any) -> None:
        place = place_in(pool_ref.shape[1], length, jnp.where(inside, start, 0), columns)
        words = plt.load(pool_ref.at[place], mask=mask & inside, other=0)
        plt.store(out_ref.at[pool, run, columns], words, mask=mask)

    for index, pool_ref in enumerate(pool_refs):
        pl.when(pool == index)(functools.partial(move, pool_ref))


def place_in(row: int, length: int, start: jax.Array, columns: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`(row, word)` of the words `columns` of a run of `length` words that starts at a row of `row` words."""
    if length == row:
        return start, columns
    return start + columns // row, columns % row


def gather_runs(
    pools: Sequence[jax.Array], starts: jax.Array, rows_per_run: int, *, interpret: bool = False
) -> jax.Array:
    """Runs of several pools of one shape, MAX_POOLS in a launch; zeros for those that start outside.

    Args:
      pools: words of any dtype `[rows, row]` each.
      starts: int32 `[pools, n, runs]`, first row of each run.
      rows_per_run: static.
      interpret: run on the CPU, slowly, as the kernel would (static).

    Returns:
      `[pools, n, runs, rows_per_run, row]`.
    """
    (num_rows, row), dtype = pools[0].shape, pools[0].dtype
    shape = (*starts.shape, rows_per_run, row)
    if 0 in shape:
        return jnp.zeros(shape, dtype)
    if len(pools) > MAX_POOLS:
        parts = [slice(first, first + MAX_POOLS) for first in range(0, len(pools), MAX_POOLS)]
        found = [gather_runs(pools[part], starts[part], rows_per_run, interpret=interpret) for part in parts]
        return jnp.concatenate(found)
    length, runs = rows_per_run * row, starts.shape[1] * starts.shape[2]
    tiles = tiles_of(length, dtype.itemsize)
    if tiles.count > MAX_TILES:
        raise ValueError(f"runs of {length} words: expected at most {MAX_TILES * tiles.width}")
    out = jax.ShapeDtypeStruct((len(pools), runs, length), dtype)
    check_addressable(pools[0], out)
    call = pl.pallas_call(
        functools.partial(_kernel, tiles=tiles, length=length, last=num_rows - rows_per_run),
        out_shape=out,
        grid=(runs, tiles.count, len(pools)),
        compiler_params=plt.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=interpret,
        name="gather_runs",
    )
    return call(starts.reshape(len(pools), runs), *pools).reshape(shape)

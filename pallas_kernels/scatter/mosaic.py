"""Scatter by Pallas on Mosaic GPU, in place: the ring of `pallas_kernels.gather.mosaic` the other way round."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.scatter import pallas_triton
from pallas_kernels.tma_tiles import NUM_STAGES, TASKS_PER_PROGRAM, tma_tiles

AXIS = "program"


def _ring(
    targets_ref: Any, values_ref: Any, pool_ref: Any, smem: Any, barriers: Any, *, tasks: int, num_tiles: int
) -> None:
    """Moves up to TASKS_PER_PROGRAM tiles; a tile whose target does not exist is loaded and let go."""
    first = lax.axis_index(AXIS) * TASKS_PER_PROGRAM

    def load(index: Any, stage: Any) -> None:
        task = first + index

        @pl.when(task < tasks)
        def _() -> None:
            plgpu.copy_gmem_to_smem(values_ref.at[task], smem.at[stage], barriers.at[stage])

    for stage in range(min(NUM_STAGES, TASKS_PER_PROGRAM)):
        load(stage, stage)

    def store(index: jax.Array, carry: tuple[()]) -> tuple[()]:
        task, stage = first + index, lax.rem(index, NUM_STAGES)

        @pl.when(task < tasks)
        def _() -> None:
            plgpu.barrier_wait(barriers.at[stage])
            target = targets_ref[task]

            @pl.when(target < num_tiles)
            def _() -> None:
                plgpu.copy_smem_to_gmem(smem.at[stage], pool_ref.at[target])

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            @pl.when(index + NUM_STAGES < TASKS_PER_PROGRAM)
            def _() -> None:
                load(index + NUM_STAGES, stage)

        return carry

    lax.fori_loop(0, TASKS_PER_PROGRAM, store, ())
    plgpu.wait_smem_to_gmem(0)


def scatter_runs(rows: jax.Array, starts: jax.Array, values: jax.Array, *, interpret: Any = False) -> jax.Array:
    """The pool with some runs replaced, in place when it is donated; runs that start outside of it are dropped.

    Args:
      rows: words of any dtype `[rows, row]`.
      starts: int32 `[n, runs]`, first row of each run; no two runs inside the pool overlap.
      values: `[n, runs, rows of a run, row]` of the same dtype.
      interpret: False, or the parameters of Mosaic GPU's interpreter (static).
    """
    num_rows, row = rows.shape
    rows_per_run = values.shape[2]
    tiles = tma_tiles(row * rows.dtype.itemsize, rows.dtype.itemsize)
    if tiles is None:
        return pallas_triton.scatter_runs(rows, starts, values, interpret=bool(interpret))
    if 0 in values.shape:
        return rows
    inside = (starts >= 0) & (starts <= num_rows - rows_per_run)
    lines = jnp.where(inside[..., None], starts[..., None] + jnp.arange(rows_per_run, dtype=jnp.int32), num_rows)
    targets = (lines[..., None] * tiles.count + jnp.arange(tiles.count, dtype=jnp.int32)).reshape(-1)
    pool = scatter_tiles(tiles.view(rows), targets, tiles.view(values.reshape(-1, row)), interpret=interpret)
    return tiles.unview(pool, rows.dtype, row)


def scatter_tiles(pool: jax.Array, targets: jax.Array, values: jax.Array, *, interpret: Any = False) -> jax.Array:
    """The pool `[tiles, lines, words]` with some tiles replaced; indices past the end, int32 `[n]`, are dropped."""
    (tasks,), (num_tiles, *tile) = targets.shape, pool.shape
    body = functools.partial(_ring, tasks=tasks, num_tiles=num_tiles)

    def kernel(*refs: Any) -> None:
        smem = plgpu.SMEM((NUM_STAGES, *tile), pool.dtype)
        pl.run_scoped(functools.partial(body, *refs), smem, plgpu.Barrier(num_barriers=NUM_STAGES))

    mesh = plgpu.Mesh(grid=(pl.cdiv(tasks, TASKS_PER_PROGRAM),), grid_names=(AXIS,))
    ref = jax.new_ref(pool)
    pl.kernel(kernel, out_type=(), mesh=mesh, interpret=interpret, name="scatter_tiles")(targets, values, ref)
    return jax.freeze(ref)

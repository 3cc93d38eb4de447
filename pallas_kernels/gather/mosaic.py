"""Gather by Pallas on Mosaic GPU: bulk copies through a ring of stages in shared memory, Hopper and later.

No byte passes through registers. Rows that are no multiple of 128 bytes cannot be moved so; they take the register path
of `pallas_kernels.gather.pallas_triton`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gather import pallas_triton
from pallas_kernels.tma_tiles import NUM_STAGES, TASKS_PER_PROGRAM, tma_tiles

AXIS = "program"


def _ring(
    sources_ref: Any, pool_ref: Any, out_ref: Any, smem: Any, barriers: Any, *, tasks: int, num_tiles: int
) -> None:
    """Moves up to TASKS_PER_PROGRAM tiles: load k + NUM_STAGES is under way while tile k is stored."""
    first = lax.axis_index(AXIS) * TASKS_PER_PROGRAM

    def exists(task: jax.Array) -> jax.Array:
        # A tile that does not exist still goes round the ring: the first one is loaded in its place, and not kept.
        return jnp.minimum(sources_ref[task], num_tiles - 1)

    def load(index: Any, stage: Any) -> None:
        task = first + index

        @pl.when(task < tasks)
        def _() -> None:
            plgpu.copy_gmem_to_smem(pool_ref.at[exists(task)], smem.at[stage], barriers.at[stage])

    for stage in range(min(NUM_STAGES, TASKS_PER_PROGRAM)):
        load(stage, stage)

    def store(index: jax.Array, carry: tuple[()]) -> tuple[()]:
        task, stage = first + index, lax.rem(index, NUM_STAGES)

        @pl.when(task < tasks)
        def _() -> None:
            plgpu.barrier_wait(barriers.at[stage])
            plgpu.copy_smem_to_gmem(smem.at[stage], out_ref.at[task])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            @pl.when(index + NUM_STAGES < TASKS_PER_PROGRAM)
            def _() -> None:
                load(index + NUM_STAGES, stage)

        return carry

    lax.fori_loop(0, TASKS_PER_PROGRAM, store, ())
    plgpu.wait_smem_to_gmem(0)


def gather_runs(rows: jax.Array, starts: jax.Array, rows_per_run: int, *, interpret: Any = False) -> jax.Array:
    """Runs of a pool; zeros for those that start outside of it.

    Args:
      rows: words of any dtype `[rows, row]`.
      starts: int32 `[n, runs]`, first row of each run.
      rows_per_run: static.
      interpret: False, or the parameters of Mosaic GPU's interpreter (static).

    Returns:
      `[n, runs, rows_per_run, row]`.
    """
    num_rows, row = rows.shape
    shape = (*starts.shape, rows_per_run, row)
    tiles = tma_tiles(row * rows.dtype.itemsize, rows.dtype.itemsize)
    if tiles is None:
        return pallas_triton.gather_runs(rows, starts, rows_per_run, interpret=bool(interpret))
    if 0 in shape:
        return jnp.zeros(shape, rows.dtype)
    inside = (starts >= 0) & (starts <= num_rows - rows_per_run)
    lines = jnp.where(inside, starts, num_rows)[..., None] + jnp.arange(rows_per_run, dtype=jnp.int32)
    sources = (lines[..., None] * tiles.count + jnp.arange(tiles.count, dtype=jnp.int32)).reshape(-1)
    found = gather_tiles(tiles.view(rows), sources, interpret=interpret)
    runs = tiles.unview(found, rows.dtype, row).reshape(shape)
    return jnp.where(inside[..., None, None], runs, 0)


def gather_tiles(pool: jax.Array, sources: jax.Array, *, interpret: Any = False) -> jax.Array:
    """Tiles `[tiles, lines, words]` of a pool by their indices, int32 `[n]`; undefined for indices past the end."""
    (tasks,), (num_tiles, *tile) = sources.shape, pool.shape
    body = functools.partial(_ring, tasks=tasks, num_tiles=num_tiles)

    def kernel(*refs: Any) -> None:
        smem = plgpu.SMEM((NUM_STAGES, *tile), pool.dtype)
        pl.run_scoped(functools.partial(body, *refs), smem, plgpu.Barrier(num_barriers=NUM_STAGES))

    mesh = plgpu.Mesh(grid=(pl.cdiv(tasks, TASKS_PER_PROGRAM),), grid_names=(AXIS,))
    out = jax.ShapeDtypeStruct((tasks, *tile), pool.dtype)
    return pl.kernel(kernel, out_type=out, mesh=mesh, interpret=interpret, name="gather_tiles")(sources, pool)

"""Scatter by Pallas on Mosaic GPU, in place: the ring of `pallas_kernels.gather.mosaic` the other way round."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gather.mosaic import AXIS, ring
from pallas_kernels.tma_tiles import MAX_POOLS, NUM_STAGES, TASKS_PER_PROGRAM, TmaTiles, required_tma_tiles


def _body(lines_ref: Any, values_ref: Any, *refs: Any, tiles: TmaTiles, num_lines: int, tasks: int) -> None:
    *pool_refs, smem, barriers = refs
    first = lax.axis_index(AXIS) * TASKS_PER_PROGRAM
    total = tasks * len(pool_refs)

    def load(index: Any, stage: Any) -> None:
        task = first + index

        @pl.when(task < total)
        def _() -> None:
            source = values_ref.at[pl.ds(task * tiles.lines, tiles.lines)]
            plgpu.copy_gmem_to_smem(source, smem.at[stage], barriers.at[stage])

    def store(index: Any, stage: Any) -> None:
        task = first + index

        @pl.when(task < total)
        def _() -> None:
            line = lines_ref[task]
            for pool, pool_ref in enumerate(pool_refs):

                @pl.when((line < num_lines) & (task >= pool * tasks) & (task < (pool + 1) * tasks))
                def _(pool_ref: Any = pool_ref) -> None:
                    target = pool_ref.at[pl.ds(line, tiles.lines)]
                    plgpu.copy_smem_to_gmem(smem.at[stage], target, commit_group=False)

    def wait(index: Any) -> None:
        @pl.when(first + index < total)
        def _() -> None:
            plgpu.barrier_wait(barriers.at[lax.rem(index, NUM_STAGES)])

    ring(load, store, wait)


def scatter_runs(
    pools: Sequence[jax.Array], starts: jax.Array, values: jax.Array, *, interpret: Any = False
) -> tuple[jax.Array, ...]:
    """Several pools of one shape with some runs replaced, MAX_POOLS in a launch, in place where donated.

    Args:
      pools: words of any dtype `[rows, row]` each.
      starts: int32 `[pools, n, runs]`, first row of each run; runs that start outside are dropped, and no two inside
        one pool overlap.
      values: `[pools, n, runs, rows of a run, row]` of the same dtype.
      interpret: False, or the parameters of Mosaic GPU's interpreter (static).

    Raises:
      ValueError: runs that no bulk copy can move.
    """
    (num_rows, row), dtype = pools[0].shape, pools[0].dtype
    rows_per_run = values.shape[3]
    tiles = required_tma_tiles(row, rows_per_run, dtype.itemsize)
    if 0 in values.shape:
        return tuple(pools)
    if len(pools) > MAX_POOLS:
        parts = [slice(first, first + MAX_POOLS) for first in range(0, len(pools), MAX_POOLS)]
        written = [scatter_runs(pools[part], starts[part], values[part], interpret=interpret) for part in parts]
        return tuple(pool for some in written for pool in some)
    num_lines = num_rows * tiles.lines_per_row
    inside = (starts >= 0) & (starts <= num_rows - rows_per_run)
    lines = tiles.first_lines(starts, inside, num_lines).reshape(-1)
    body = functools.partial(_body, tiles=tiles, num_lines=num_lines, tasks=lines.size // len(pools))

    def kernel(*refs: Any) -> None:
        smem = plgpu.SMEM((NUM_STAGES, tiles.lines, tiles.words), dtype)
        pl.run_scoped(functools.partial(body, *refs), smem, plgpu.Barrier(num_barriers=NUM_STAGES))

    mesh = plgpu.Mesh(grid=(pl.cdiv(lines.size, TASKS_PER_PROGRAM),), grid_names=(AXIS,))
    views = [jax.new_ref(pool.reshape(num_lines, tiles.words)) for pool in pools]
    call: Any = pl.kernel(kernel, out_type=(), mesh=mesh, interpret=interpret, name="scatter_runs")
    call(lines, values.reshape(-1, tiles.words), *views)
    return tuple(jax.freeze(view).reshape(num_rows, row) for view in views)

"""Gather by Pallas on Mosaic GPU: bulk copies through a ring of stages in shared memory, Hopper and later.

No byte passes through registers. Runs that no bulk copy can move are refused: those are for
`pallas_kernels.gather.pallas_triton`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tma_tiles import MAX_POOLS, NUM_STAGES, TASKS_PER_PROGRAM, TmaTiles, required_tma_tiles

AXIS = "program"


def ring(load: Callable[[Any, Any], None], store: Callable[[Any, Any], None], wait: Callable[[Any], None]) -> None:
    """Moves TASKS_PER_PROGRAM tiles through NUM_STAGES stages: loads run ahead, one store may still be under way.

    Args:
      load: starts loading tile `k` of the program into a stage; nothing for tiles that are not there.
      store: starts storing tile `k` from a stage, as part of the group that is open.
      wait: waits until tile `k`'s stage is full.
    """
    ahead = NUM_STAGES - 1

    def fill(index: jax.Array, carry: tuple[()]) -> tuple[()]:
        load(index, index)
        return carry

    lax.fori_loop(0, min(ahead, TASKS_PER_PROGRAM), fill, ())

    def step(index: jax.Array, carry: tuple[()]) -> tuple[()]:
        wait(index)
        store(index, lax.rem(index, NUM_STAGES))
        # A group for every tile, stored or not: waiting counts groups.
        plgpu.commit_smem_to_gmem_group()
        # The store before this one has read its stage, which is the one that tile index + ahead goes to.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)

        @pl.when(index + ahead < TASKS_PER_PROGRAM)
        def _() -> None:
            load(index + ahead, lax.rem(index + ahead, NUM_STAGES))

        return carry

    lax.fori_loop(0, TASKS_PER_PROGRAM, step, ())
    plgpu.wait_smem_to_gmem(0)


def _body(
    lines_ref: Any, zeros_ref: Any, *refs: Any, tiles: TmaTiles, num_lines: int, tasks: int, num_pools: int
) -> None:
    *pool_refs, out_ref, smem, barriers = refs
    first = lax.axis_index(AXIS) * TASKS_PER_PROGRAM
    total = tasks * num_pools

    def load(index: Any, stage: Any) -> None:
        task = first + index

        @pl.when(task < total)
        def _() -> None:
            line = lines_ref[task]

            @pl.when(line >= num_lines)
            def _() -> None:
                plgpu.copy_gmem_to_smem(zeros_ref, smem.at[stage], barriers.at[stage])

            for pool, pool_ref in enumerate(pool_refs):

                @pl.when((line < num_lines) & (task >= pool * tasks) & (task < (pool + 1) * tasks))
                def _(pool_ref: Any = pool_ref) -> None:
                    source = pool_ref.at[pl.ds(line, tiles.lines)]
                    plgpu.copy_gmem_to_smem(source, smem.at[stage], barriers.at[stage])

    def store(index: Any, stage: Any) -> None:
        task = first + index

        @pl.when(task < total)
        def _() -> None:
            target = out_ref.at[pl.ds(task * tiles.lines, tiles.lines)]
            plgpu.copy_smem_to_gmem(smem.at[stage], target, commit_group=False)

    def wait(index: Any) -> None:
        @pl.when(first + index < total)
        def _() -> None:
            plgpu.barrier_wait(barriers.at[lax.rem(index, NUM_STAGES)])

    ring(load, store, wait)


def gather_runs(
    pools: Sequence[jax.Array], starts: jax.Array, rows_per_run: int, *, interpret: Any = False
) -> jax.Array:
    """Runs of several pools of one shape, MAX_POOLS in a launch; zeros for those that start outside.

    Args:
      pools: words of any dtype `[rows, row]` each.
      starts: int32 `[pools, n, runs]`, first row of each run.
      rows_per_run: static.
      interpret: False, or the parameters of Mosaic GPU's interpreter (static).

    Returns:
      `[pools, n, runs, rows_per_run, row]`.

    Raises:
      ValueError: runs that no bulk copy can move.
    """
    (num_rows, row), dtype = pools[0].shape, pools[0].dtype
    shape = (*starts.shape, rows_per_run, row)
    tiles = required_tma_tiles(row, rows_per_run, dtype.itemsize)
    if 0 in shape:
        return jnp.zeros(shape, dtype)
    if len(pools) > MAX_POOLS:
        parts = [slice(first, first + MAX_POOLS) for first in range(0, len(pools), MAX_POOLS)]
        found = [gather_runs(pools[part], starts[part], rows_per_run, interpret=interpret) for part in parts]
        return jnp.concatenate(found)
    num_lines = num_rows * tiles.lines_per_row
    inside = (starts >= 0) & (starts <= num_rows - rows_per_run)
    lines = tiles.first_lines(starts, inside, num_lines).reshape(-1)
    tasks = lines.size // len(pools)
    body = functools.partial(_body, tiles=tiles, num_lines=num_lines, tasks=tasks, num_pools=len(pools))

    def kernel(*refs: Any) -> None:
        smem = plgpu.SMEM((NUM_STAGES, tiles.lines, tiles.words), dtype)
        pl.run_scoped(functools.partial(body, *refs), smem, plgpu.Barrier(num_barriers=NUM_STAGES))

    mesh = plgpu.Mesh(grid=(pl.cdiv(lines.size, TASKS_PER_PROGRAM),), grid_names=(AXIS,))
    out = jax.ShapeDtypeStruct((lines.size * tiles.lines, tiles.words), dtype)
    call: Any = pl.kernel(kernel, out_type=out, mesh=mesh, interpret=interpret, name="gather_runs")
    views = [pool.reshape(num_lines, tiles.words) for pool in pools]
    return call(lines, jnp.zeros((tiles.lines, tiles.words), dtype), *views).reshape(shape)

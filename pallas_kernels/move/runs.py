"""Gathering and scattering runs of several pools of one shape, as moves of any implementation.

A pool a move, all in one launch: a kernel's launch takes longer than moving a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.move.moves import Move

MoveRuns = Callable[..., tuple[jax.Array, ...]]
"""An implementation: sources, targets and moves to targets."""


def gather_runs(move_runs: MoveRuns, pools: Sequence[jax.Array], starts: jax.Array, rows_per_run: int) -> jax.Array:
    """Runs `[pools, n, runs, rows_per_run, row]` of pools `[rows, row]` of words; zeros for those that start outside.

    `starts` is int32 `[pools, n, runs]`, the first row of each run.
    """
    row, dtype = pools[0].shape[1], pools[0].dtype
    count, length = starts.shape[1] * starts.shape[2], rows_per_run * row
    moves = [
        Move(pool, pool, starts[pool].reshape(-1), None, count, row, length, zeros=True) for pool in range(len(pools))
    ]
    targets = [jax.ShapeDtypeStruct((count * length,), dtype)] * len(pools)
    found = move_runs([pool.reshape(-1) for pool in pools], targets, moves)
    shaped = [array.reshape(*starts.shape[1:], rows_per_run, row) for array in found]
    return shaped[0][None] if len(shaped) == 1 else jnp.stack(shaped)


def scatter_runs(
    move_runs: MoveRuns, pools: Sequence[jax.Array], starts: jax.Array, values: jax.Array
) -> tuple[jax.Array, ...]:
    """Pools `[rows, row]` of words with some runs replaced by `values[pools, n, runs, rows of a run, row]`, in place
    where donated.

    `starts` is int32 `[pools, n, runs]`, the first row of each; runs that start outside are dropped, and no two inside
    one pool overlap.
    """
    row, count = pools[0].shape[1], starts.shape[1] * starts.shape[2]
    length = values.shape[3] * row
    moves = [Move(pool, pool, None, starts[pool].reshape(-1), count, row, length) for pool in range(len(pools))]
    sources = [values[pool].reshape(-1) for pool in range(len(pools))]
    found = move_runs(sources, [pool.reshape(-1) for pool in pools], moves)
    return tuple(array.reshape(pool.shape) for array, pool in zip(found, pools, strict=True))

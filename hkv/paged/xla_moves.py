"""`move_runs` by plain XLA: each move a gather that a GPU's compiler fuses into the scatter of its values."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from hkv.layout.views import xla
from pallas_kernels.move.moves import Move, last_start


def move_runs(
    sources: Sequence[jax.Array], targets: Sequence[jax.Array | jax.ShapeDtypeStruct], moves: Sequence[Move]
) -> tuple[jax.Array, ...]:
    """As `pallas_kernels.move.pallas_triton.move_runs`; a launch for each move.

    A target that is read as well is read into an array of its own: XLA would copy all of it first.
    """
    found = list(targets)
    for move in moves:
        target = found[move.target]
        source = move.array(sources, found)
        if isinstance(target, jax.ShapeDtypeStruct):
            found[move.target] = _read(source, move).reshape(target.shape)
            continue
        words, starts = _read(source, move), _written(source, target.size, move)
        if move.reciprocal is not None:
            words = move.quantised(words, move.reciprocal[:, None], jnp.round)
        rows = _rows(target, move, starts)
        if move.own:
            words, rows = jax.lax.optimization_barrier((words, rows))
        values = words.reshape(1, move.runs, 1, move.length // move.unit, move.unit)
        rows = xla.scatter_runs([rows], _of_runs(starts), values)[0]
        found[move.target] = rows.reshape(target.shape)
    return tuple(jnp.zeros(t.shape, t.dtype) if isinstance(t, jax.ShapeDtypeStruct) else t for t in found)


def _read(source: jax.Array, move: Move) -> jax.Array:
    """Words `[runs, length]`, zeros for runs outside."""
    if not move.reads:
        return jnp.zeros((move.runs, move.length), source.dtype)
    if move.read is None:
        return source.reshape(-1)[: move.runs * move.length].reshape(move.runs, move.length)
    rows, starts = _rows(source, move, move.read), _of_runs(move.read)
    return xla.gather_runs([rows], starts, move.length // move.unit).reshape(move.runs, move.length)


def _rows(array: jax.Array, move: Move, starts: jax.Array) -> jax.Array:
    """`[units, unit]`, or `[pages, units of a page, unit]` where starts have two numbers."""
    return array.reshape(*((-1, move.page) if starts.ndim == 2 else (-1,)), move.unit)


def _of_runs(starts: jax.Array) -> jax.Array:
    """Starts of runs as those of units of one run each, of one array."""
    return starts[None, :, None]


def _written(source: jax.Array, size: int, move: Move) -> jax.Array:
    """Int32 `[runs]` or `[runs, 2]`, where each run goes; outside for those of which nothing is to be moved."""
    step = move.length // move.unit
    starts = jnp.arange(move.runs, dtype=jnp.int32) * step if move.written is None else move.written
    if not move.reads or move.read is None or move.zeros:
        return starts
    if move.read.ndim == 2:
        here = (move.read[:, 0] >= 0) & (move.read[:, 0] < source.size // (move.page * move.unit))
    else:
        here = (move.read >= 0) & (move.read <= last_start(source.size, move))
    paged = starts.ndim == 2
    outside = size // move.unit // (move.page if paged else 1)
    return jnp.where(here[:, None] if paged else here, starts, outside)

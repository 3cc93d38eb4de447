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
        rows = target.reshape(-1, move.unit)
        if move.own:
            words, rows = jax.lax.optimization_barrier((words, rows))
        values = words.reshape(1, move.runs, 1, move.length // move.unit, move.unit)
        rows = xla.scatter_runs([rows], starts.reshape(1, -1, 1), values)[0]
        found[move.target] = rows.reshape(target.shape)
    return tuple(jnp.zeros(t.shape, t.dtype) if isinstance(t, jax.ShapeDtypeStruct) else t for t in found)


def _read(source: jax.Array, move: Move) -> jax.Array:
    """Words `[runs, length]`, zeros for runs outside."""
    if not move.reads:
        return jnp.zeros((move.runs, move.length), source.dtype)
    if move.read is None:
        return source.reshape(-1)[: move.runs * move.length].reshape(move.runs, move.length)
    rows, starts = source.reshape(-1, move.unit), move.read.reshape(1, -1, 1)
    return xla.gather_runs([rows], starts, move.length // move.unit).reshape(move.runs, move.length)


def _written(source: jax.Array, size: int, move: Move) -> jax.Array:
    """Int32 `[runs]`, where each run goes; outside for those of which nothing is to be moved."""
    step = move.length // move.unit
    starts = jnp.arange(move.runs, dtype=jnp.int32) * step if move.written is None else move.written
    if not move.reads or move.read is None or move.zeros:
        return starts
    last = last_start(source.size, move)
    return jnp.where((move.read >= 0) & (move.read <= last), starts, size // move.unit)

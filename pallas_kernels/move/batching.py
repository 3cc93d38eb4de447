"""`vmap` of any `move_runs`: a batch of arrays is one array, and its moves are more moves of the same launch.

A kernel has no batching rule of its own that would keep arrays in place. Here the batch's arrays lie one after the
other, and every start gets the offset of its array; so one launch serves the batch, and donation holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from pallas_kernels.move.moves import Move, last_start

MoveRuns = Callable[[Sequence[Any], Sequence[Any], Sequence[Move]], tuple[jax.Array, ...]]

MOST_UNITS = 2**31 - 1
"""Units that a start can count."""


def batched(move_runs: MoveRuns) -> MoveRuns:
    """A `move_runs` that `jax.vmap` maps over arrays and tables, however deep, in a launch for the whole batch."""

    def call(sources: Sequence[Any], targets: Sequence[Any], moves: Sequence[Move]) -> tuple[jax.Array, ...]:
        made = [isinstance(target, jax.ShapeDtypeStruct) for target in targets]

        @custom_vmap
        def moved(sources: Any, given: Any, tables: Any) -> tuple[jax.Array, ...]:
            arrays = iter(given)
            whole = [target if new else next(arrays) for target, new in zip(targets, made, strict=True)]
            return tuple(move_runs(sources, whole, _with_tables(moves, tables)))

        @moved.def_vmap
        def _(size: int, batched: Any, sources: Any, given: Any, tables: Any) -> tuple[Any, Any]:
            of_source, of_given, of_table = batched
            arrays, which = iter(given), iter(of_given)
            whole = [
                _times(t, size) if new else _spread(next(arrays), next(which), size)
                for t, new in zip(targets, made, strict=True)
            ]
            together = [
                _together(move, size, sources, targets, of_source, table, mapped)
                for move, table, mapped in zip(moves, tables, of_table, strict=True)
            ]
            flat = [source.reshape(-1) for source in sources]
            found = call(flat, whole, together)
            return tuple(array.reshape(size, -1) for array in found), (True,) * len(found)

        return moved(list(sources), [t for t, new in zip(targets, made, strict=True) if not new], _tables(moves))

    return call


TABLES = ("read", "written", "reciprocal")


def _tables(moves: Sequence[Move]) -> list[dict[str, jax.Array]]:
    return [{name: table for name in TABLES if (table := getattr(move, name)) is not None} for move in moves]


def _with_tables(moves: Sequence[Move], tables: Sequence[dict[str, jax.Array]]) -> list[Move]:
    return [dataclasses.replace(move, **named) for move, named in zip(moves, tables, strict=True)]


def _times(target: jax.ShapeDtypeStruct, size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size * target.size,), target.dtype)


def _spread(array: jax.Array, mapped: bool, size: int) -> jax.Array:
    """The arrays of a batch, one after the other."""
    return (array if mapped else jnp.broadcast_to(array, (size, *array.shape))).reshape(-1)


def _together(
    move: Move, size: int, sources: Any, targets: Any, of_source: Any, tables: dict[str, Any], mapped: dict[str, Any]
) -> Move:
    """The moves of a batch as one, of arrays that lie one after the other."""

    def places(name: str, words: int, apart: bool) -> jax.Array | None:
        """Starts `[size * runs]`, each counted from its own array; None where they still follow one another."""
        table = tables.get(name)
        if table is None and apart and words == move.runs * move.length:
            return None
        if words * (size if apart else 1) // move.unit > MOST_UNITS:
            raise ValueError(f"{size} arrays of {words} words: expected at most {MOST_UNITS} units of {move.unit}")
        if table is None:
            table = jnp.arange(move.runs, dtype=jnp.int32) * (move.length // move.unit)
        rows = table if mapped.get(name) else jnp.broadcast_to(table, (size, move.runs))
        # Checked before the batch's offset is added: a run behind one array's end must not reach into the next.
        inside = (rows >= 0) & (rows <= last_start(words, move))
        first = np.arange(size, dtype=np.int32)[:, None] * np.int32(words // move.unit * apart)
        return jnp.where(inside, rows + first, -1).reshape(-1)

    target = targets[move.target].size
    if move.own or move.source is None:
        source, apart = target, True
    else:
        # A source that is not mapped is one array for the whole batch: starts in it need no offset.
        apart = of_source[move.source]
        source = sources[move.source].size // (size if apart else 1)
    read = places("read", source, apart) if move.reads else None
    written = places("written", target, True)
    reciprocal = tables.get("reciprocal")
    if reciprocal is not None:
        rows = reciprocal if mapped["reciprocal"] else jnp.broadcast_to(reciprocal, (size, move.runs))
        reciprocal = rows.reshape(-1)
    return dataclasses.replace(move, read=read, written=written, reciprocal=reciprocal, runs=size * move.runs)

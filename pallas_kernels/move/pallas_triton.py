"""Moving runs by Pallas on Triton: 16 bytes a thread where units allow, short runs several to a program.

JAX 0.11 deprecates the backend and warns when it is lowered, which is why it is kept apart.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.move.moves import Move, kernel_name, last_start
from pallas_kernels.triton_tiles import MAX_MOVES, NUM_WARPS, Share, check_addressable, shares_of


def units_of(moves: Sequence[Move], num_sources: int, num_targets: int) -> tuple[list[int], list[int]]:
    """Words of a row of each source and each target: what divides the unit of every move that it has a part in."""
    sources, targets = [0] * num_sources, [0] * num_targets
    for move in moves:
        if move.source is not None:
            sources[move.source] = math.gcd(sources[move.source], move.unit)
        targets[move.target] = math.gcd(targets[move.target], move.unit)
    return sources, targets


def _kernel(
    *refs: Any, moves: Sequence[Move], shares: Sequence[Share], tables: Sequence[Any], num: Any, interpreted: bool
) -> None:
    num_tables, num_sources, num_targets = num
    sources = refs[num_tables : num_tables + num_sources]
    targets = refs[len(refs) - num_targets :]  # those before are the same memory, as inputs
    program = pl.program_id(0)
    for move, share, table in zip(moves, shares, tables, strict=True):
        read, written, scale = (None if index is None else refs[index] for index in table)
        target, source = targets[move.target], move.array(sources, targets)
        body = functools.partial(
            _move, move, share, program - share.first, (read, written, scale), source, target, interpreted=interpreted
        )
        # One launch for all moves, each with a stretch of programs: a launch of its own would cost more than a short
        # move.
        here = (program >= share.first) & (program < share.first + share.programs)
        pl.when(True if len(moves) == 1 else here)(body)


def _move(move: Move, share: Share, program: Any, tables: Any, source: Any, target: Any, *, interpreted: bool) -> None:
    read, written, scale = tables
    block, tile = lax.div(program, np.int32(share.tiles)), lax.rem(program, np.int32(share.tiles))
    run = block * share.runs + jnp.arange(share.runs, dtype=jnp.int32)
    column = tile * share.width + jnp.arange(share.width, dtype=jnp.int32)
    present = run < move.runs
    to, kept = _starts(move, run, written, present, target)
    mask = kept[:, None] & (column < move.length)[None, :]
    if move.reads:
        start, there = _starts(move, run, read, present, source)
        mask = mask if move.zeros else mask & there[:, None]
        words = plt.load(source.at[_place(source, start, column)], mask=mask & there[:, None], other=0)
        if scale is not None:
            words = move.quantised(words, plt.load(scale.at[run], mask=present, other=0)[:, None], _rounded)
    else:
        words = jnp.zeros(mask.shape, target.dtype)
    row, word = _place(target, to, column)
    if interpreted:
        # Where the mask is false the interpreter writes what was there, perhaps after another run was written there.
        row = jnp.where(mask, row, target.shape[0])
    plt.store(target.at[row, word], words, mask=mask)


def _rounded(numbers: Any) -> Any:
    """Rounded to nearest even, of magnitudes that 32-bit integers have: Pallas on Triton has no rounding of its own."""
    whole = numbers.astype(jnp.int32)
    rest = numbers - whole.astype(jnp.float32)
    away = jnp.where(rest > 0, np.int32(1), np.int32(-1))
    half = np.float32(0.5)
    further = (jnp.abs(rest) > half) | ((jnp.abs(rest) == half) & (whole & 1 == 1))
    return jnp.where(further, whole + away, whole)


def _starts(move: Move, run: Any, table: Any, present: Any, array: Any) -> tuple[Any, Any]:
    """First row of each run, 0 for none, and whether it exists."""
    rows, row = array.shape
    if table is None:
        return jnp.where(present, run * (move.length // row), 0), present
    # -1 for lanes beyond the last run: outside, like any start that does not fit.
    start = plt.load(table.at[run], mask=present, other=-1)
    inside = (start >= 0) & (start <= last_start(rows * row, move))
    return jnp.where(inside, start * (move.unit // row), 0), inside


def _place(array: Any, start: Any, column: Any) -> tuple[Any, Any]:
    """`(row, word)` of words of runs: the number of a word alone may pass 32 bits."""
    shape, row = (start.size, column.size), np.int32(array.shape[1])
    # Not `//` and `%`: these round down below 0 as well, and Triton then sees no words side by side.
    line, word = lax.div(column, jnp.full_like(column, row)), lax.rem(column, jnp.full_like(column, row))
    return start[:, None] + line[None, :], jnp.broadcast_to(word[None, :], shape)


def move_runs(
    sources: Sequence[jax.Array],
    targets: Sequence[jax.Array | jax.ShapeDtypeStruct],
    moves: Sequence[Move],
    *,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """The targets with runs of the sources in them, MAX_MOVES in a launch, in place where donated.

    Sources are words `[words]` each of one dtype; so are targets, or the shape and dtype of one that is made, every
    word of which the moves write. `interpret` (static): run on the CPU, slowly, as the kernel would.
    """
    moves, given = [move for move in moves if move.runs and move.length], cast("Any", targets)
    if len(moves) > MAX_MOVES:
        for first in range(0, len(moves), MAX_MOVES):
            given = move_runs(sources, given, moves[first : first + MAX_MOVES], interpret=interpret)
        return given
    if not moves:
        return tuple(jnp.zeros(t.shape, t.dtype) if made else t for t, made in _made(targets))
    if _rows(moves, sources, targets) > MOST_ROWS and len(units := sorted({move.unit for move in moves})) > 1:
        for unit in units:  # each alone has rows of its own unit, of which int32 counts them all
            given = move_runs(sources, given, [move for move in moves if move.unit == unit], interpret=interpret)
        return given
    return _launch(sources, targets, moves, interpret)


MOST_ROWS = 1 << 31
"""Rows of an array whose indices int32 holds."""


def _rows(moves: Sequence[Move], sources: Sequence[Any], targets: Sequence[Any]) -> int:
    """Most rows that one of the arrays has in a launch of these moves, which share the row that divides their units."""
    units = (*zip(units_of(moves, len(sources), len(targets)), (sources, targets), strict=True),)
    return max(array.size // row for rows, arrays in units for row, array in zip(rows, arrays, strict=True) if row)


def _launch(sources: Any, targets: Any, moves: Sequence[Move], interpret: bool) -> tuple[jax.Array, ...]:
    check_addressable(*sources, *targets)
    if (rows := _rows(moves, sources, targets)) > MOST_ROWS:
        raise ValueError(f"{rows} rows of {moves[0].unit} words: expected at most {MOST_ROWS}, whose indices are int32")
    source_rows, target_rows = units_of(moves, len(sources), len(targets))
    shares = shares_of(moves, [targets[move.target].dtype.itemsize for move in moves])
    each = [(move.read, move.written, move.reciprocal) for move in moves]
    given = [table for some in each for table in some]
    position = itertools.count()
    tables = [tuple(None if table is None else next(position) for table in some) for some in each]
    kept = [index for index, (_, made) in enumerate(_made(targets)) if not made]
    operands = [table for table in given if table is not None]
    num = (len(operands), len(sources), len(targets))
    operands += [array.reshape(-1, row or array.size) for array, row in zip(sources, source_rows, strict=True)]
    # Targets that are given are changed in place: without the alias every launch would copy the pool.
    aliases = {len(operands) + place: index for place, index in enumerate(kept)}
    shapes = [(t.size // (row or t.size), row or t.size) for t, row in zip(targets, target_rows, strict=True)]
    operands += [targets[index].reshape(shapes[index]) for index in kept]
    call = pl.pallas_call(
        functools.partial(_kernel, moves=moves, shares=shares, tables=tables, num=num, interpreted=interpret),
        out_shape=[jax.ShapeDtypeStruct(shape, t.dtype) for shape, t in zip(shapes, targets, strict=True)],
        grid=(shares[-1].first + shares[-1].programs,),
        input_output_aliases=aliases,
        compiler_params=plt.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=interpret,
        name=kernel_name(moves, targets, sources),
    )
    return tuple(array.reshape(t.shape) for array, t in zip(call(*operands), targets, strict=True))


def _made(targets: Any) -> list[tuple[Any, bool]]:
    """Each target, and whether it is one that is made."""
    return [(target, isinstance(target, jax.ShapeDtypeStruct)) for target in targets]

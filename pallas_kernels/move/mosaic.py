"""Moving runs by Pallas on Mosaic GPU: bulk copies through a ring of stages in shared memory, Hopper and later.

No byte passes through registers. Runs that no bulk copy can move are refused: those are for
`pallas_kernels.move.pallas_triton`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.move.moves import Move, kernel_name, last_start
from pallas_kernels.tma_tiles import MAX_MOVES, MAX_STAGES, TmaTiles, required_tiles, tasks_per_program

AXIS = "program"


def ring(
    tasks: int, load: Callable[[Any, Any], None], store: Callable[[Any, Any], None], wait: Callable[[Any], None]
) -> None:
    """Moves `tasks` tiles of a program through a ring's stages: loads run ahead, one store may still be under way.

    `load` starts loading tile `k` into a stage, if there is such a tile; `wait` waits until the stage is full; `store`
    starts storing it, as part of the group that is open.
    """
    stages = stages_of(tasks)
    # One stage fewer than there are: the last one may still be read by the store before.
    ahead = max(stages - 1, 1)

    def fill(index: jax.Array, carry: tuple[()]) -> tuple[()]:
        load(index, index)
        return carry

    lax.fori_loop(0, min(ahead, tasks), fill, ())

    def step(index: jax.Array, carry: tuple[()]) -> tuple[()]:
        wait(index)
        store(index, lax.rem(index, stages))
        # A group for every tile, stored or not: waiting counts groups.
        plgpu.commit_smem_to_gmem_group()
        # The store before this one has read its stage, which is the one that tile index + ahead goes to.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)

        @pl.when(index + ahead < tasks)
        def _() -> None:
            load(index + ahead, lax.rem(index + ahead, stages))

        return carry

    lax.fori_loop(0, tasks, step, ())
    plgpu.wait_smem_to_gmem(0)


def stages_of(tasks: int) -> int:
    """Stages of the ring of a program of so many tiles."""
    return min(tasks, MAX_STAGES)


@dataclasses.dataclass(frozen=True)
class Share:
    """The tiles of a launch that belong to one move.

    Attributes:
      move: it.
      first: the first of them.
      tiles: their number.
      read: index in the table of lines of the first that they are read from; None where tile `i` is the `i`-th.
      written: the same of those that they are written to.
    """

    move: Move
    first: int
    tiles: int
    read: int | None
    written: int | None


def _body(table_ref: Any, *refs: Any, shares: Sequence[Share], lines: int, tasks: int, num_sources: int) -> None:
    """One program: `tasks` tiles, from where the table says to where it says; a line below 0 is nowhere."""
    *arrays, smem, barriers = refs
    sources, targets = arrays[:num_sources], arrays[num_sources:]
    # Programs take stretches of tiles, whatever move they belong to: short moves do not leave programs idle.
    first, stages = lax.axis_index(AXIS) * tasks, stages_of(tasks)

    def moved(index: Any, action: Callable[[Share, Any, Any], None]) -> None:
        """Calls `action` with the lines of the tile, in the branch of its move, if it goes anywhere."""
        for share in shares:
            own = first + index - share.first

            @pl.when((own >= 0) & (own < share.tiles))
            def _(share: Share = share, own: Any = own) -> None:
                places = (share.read, share.written)
                read, written = (own * lines if place is None else table_ref[place + own] for place in places)
                if not share.move.reads:
                    read = own + targets[share.move.target].shape[0]
                pl.when((read >= 0) & (written >= 0))(functools.partial(action, share, read, written))

    def load(index: Any, stage: Any) -> None:
        def action(share: Share, line: Any, _: Any) -> None:
            source = share.move.array(sources, targets)
            # Past the end where zeros are read: the copy engine makes them.
            plgpu.copy_gmem_to_smem(source.at[pl.ds(line, lines)], smem.at[stage], barriers.at[stage])

        moved(index, action)

    def store(index: Any, stage: Any) -> None:
        def action(share: Share, _: Any, line: Any) -> None:
            target = targets[share.move.target].at[pl.ds(line, lines)]
            plgpu.copy_smem_to_gmem(smem.at[stage], target, commit_group=False)

        moved(index, action)

    # Barriers count only loads that were started: a tile that goes nowhere has none to wait for.
    def wait(index: Any) -> None:
        moved(index, lambda *_: plgpu.barrier_wait(barriers.at[lax.rem(index, stages)]))

    ring(tasks, load, store, wait)


def _plan(
    sources: Sequence[Any], targets: Sequence[Any], moves: Sequence[Move], tiles: Sequence[TmaTiles]
) -> tuple[list[Share], jax.Array]:
    """The tiles of each move, and int32, the lines of all that do not follow one another."""
    shares: list[Share] = []
    table: list[jax.Array] = []
    first = length = 0
    for move, cut in zip(moves, tiles, strict=True):
        source, target = move.array(sources, targets), targets[move.target]
        count, places = move.runs * cut.count, []
        for starts, size, missing in (
            (move.read, source.size, source.size // cut.words if move.zeros else -1),
            (move.written, target.size, -1),
        ):
            places.append(None if starts is None else length)
            if starts is not None:
                # Whole runs: a run that is outside in part moves nothing, so that no tile of it is half there.
                inside = (starts >= 0) & (starts <= last_start(size, move))
                table.append(cut.first_lines(starts, inside, missing).reshape(-1))
                length += count
        shares.append(Share(move, first, count, *places))
        first += count
    return shares, jnp.concatenate(table) if table else jnp.zeros(1, jnp.int32)


def move_runs(
    sources: Sequence[jax.Array],
    targets: Sequence[jax.Array | jax.ShapeDtypeStruct],
    moves: Sequence[Move],
    *,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """The targets with runs of the sources in them, MAX_MOVES moves in a launch, in place where donated.

    Sources are words `[words]` each of one dtype; so are targets, or their shapes and dtypes if they are made and every
    word is written. `interpret`: False, or the parameters of Mosaic GPU's interpreter (static). Raises ValueError for
    runs that no bulk copy can move.
    """
    moves, given = [move for move in moves if move.runs and move.length], cast("Any", targets)
    made = all(isinstance(target, jax.ShapeDtypeStruct) for target in targets)
    if not moves:
        return tuple(jnp.zeros(t.shape, t.dtype) if made else t for t in targets)  # pyright: ignore[reportReturnType]
    if len(moves) > MAX_MOVES:
        for first in range(0, len(moves), MAX_MOVES):
            given = move_runs(sources, given, moves[first : first + MAX_MOVES], interpret=interpret)
        return given
    return _launch(sources, targets, moves, made, interpret)


def _launch(sources: Any, targets: Any, moves: Sequence[Move], made: bool, interpret: Any) -> tuple[jax.Array, ...]:
    dtype = targets[0].dtype
    tiles = required_tiles([move.unit for move in moves], [move.length for move in moves], dtype.itemsize)
    shares, table = _plan(sources, targets, moves, tiles)
    # Tiles are numbered through all moves of the launch.
    total = shares[-1].first + shares[-1].tiles
    tasks, words, lines = tasks_per_program(total), tiles[0].words, tiles[0].lines
    body = functools.partial(_body, shares=shares, lines=lines, tasks=tasks, num_sources=len(sources))

    def kernel(*refs: Any) -> None:
        smem = plgpu.SMEM((stages_of(tasks), lines, words), dtype)
        pl.run_scoped(functools.partial(body, *refs), smem, plgpu.Barrier(num_barriers=stages_of(tasks)))

    name = kernel_name(moves, targets)
    mesh = plgpu.Mesh(grid=(pl.cdiv(total, tasks),), grid_names=(AXIS,))
    views = [source.reshape(-1, words) for source in sources]
    shapes = [jax.ShapeDtypeStruct((target.size // words, words), dtype) for target in targets]
    if made:
        call: Any = pl.kernel(kernel, out_type=shapes, mesh=mesh, interpret=interpret, name=name)
        found = call(table, *views)
    else:
        call = pl.kernel(kernel, out_type=(), mesh=mesh, interpret=interpret, name=name)

        # Not `jax.new_ref`: JAX lowers a reference that is made inside of a function with a rule for `vmap` to nothing.
        @pl.run_state
        def changed(references: Any) -> None:
            call(table, *views, *references)

        found = changed([target.reshape(-1, words) for target in targets])
    return tuple(array.reshape(target.shape) for array, target in zip(found, targets, strict=True))

"""Division of a run into tiles that the Tensor Memory Accelerator (Hopper and later) moves in one copy each."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

LINE_MULTIPLE_BYTES = 16
"""Strides of a bulk copy are multiples of this."""

TILE_MULTIPLE_BYTES = 128
"""A tile is a multiple of this: JAX 0.10 copies no less than one byte a thread of a warpgroup at once."""

MAX_EXTENT = 256
"""Most elements of a bulk copy along one axis."""

STAGE_BYTES = 32 * 1024
"""Most bytes of one stage of the ring in shared memory."""

NUM_STAGES = 4
"""Stages of the ring: one less than so many loads are under way at once."""

TASKS_PER_PROGRAM = 16
"""Tiles that one program moves through its ring, at most."""

MAX_POOLS = 16
"""Most pools of one launch: each has its own branch in the kernel, and compile time grows with them."""


@dataclasses.dataclass(frozen=True)
class TmaTiles:
    """A run as equal tiles of a few lines; a line never crosses the end of a row, so runs start at lines.

    Attributes:
      words: words of a line.
      lines: lines of a tile.
      count: tiles of a run.
      lines_per_row: lines of a row.
    """

    words: int
    lines: int
    count: int
    lines_per_row: int

    def first_lines(self, starts: jax.Array, inside: jax.Array, missing: int) -> jax.Array:
        """First line of every tile of runs `[...]`, int32 `[..., count]`; `missing` for runs that are not inside."""
        tiles = jnp.arange(self.count, dtype=jnp.int32) * self.lines
        lines = jnp.where(inside, starts, 0)[..., None] * self.lines_per_row + tiles
        return jnp.where(inside[..., None], lines, missing)


def tma_tiles(row: int, rows_per_run: int, word_bytes: int) -> TmaTiles | None:
    """Tiles of runs of `rows_per_run` rows of `row` words of `word_bytes`; None where no bulk copy can move them."""
    fitting = [w for w in range(1, MAX_EXTENT + 1) if row % w == 0 and w * word_bytes % LINE_MULTIPLE_BYTES == 0]
    if not fitting or word_bytes > 4:
        return None
    words = max(fitting)
    lines, line_bytes = row * rows_per_run // words, words * word_bytes
    limit = min(MAX_EXTENT, STAGE_BYTES // line_bytes)
    whole = [n for n in range(1, limit + 1) if lines % n == 0 and n * line_bytes % TILE_MULTIPLE_BYTES == 0]
    return TmaTiles(words, max(whole), lines // max(whole), row // words) if whole else None


def required_tma_tiles(row: int, rows_per_run: int, word_bytes: int) -> TmaTiles:
    """`tma_tiles`, of runs that a bulk copy can move.

    Raises:
      ValueError: no bulk copy can.
    """
    tiles = tma_tiles(row, rows_per_run, word_bytes)
    if tiles is None:
        expected = f"lines of a multiple of {LINE_MULTIPLE_BYTES} bytes in tiles of a multiple of {TILE_MULTIPLE_BYTES}"
        raise ValueError(f"runs of {rows_per_run} rows of {row} words of {word_bytes} bytes: expected {expected}")
    return tiles

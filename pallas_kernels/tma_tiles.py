"""Division of runs into tiles that the Tensor Memory Accelerator (Hopper and later) moves in one copy each.

A bulk copy takes a box of a two-dimensional array: lines of up to 256 elements, up to 256 of them, each a multiple of
16 bytes. So the flat array is seen as lines of equal length, a run as whole tiles of them, and a start as the number of
a line.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

LINE_MULTIPLE_BYTES = 16
"""Strides of a bulk copy are multiples of this."""

TILE_MULTIPLE_BYTES = 128
"""A tile is a multiple of this: JAX 0.10 copies no less than one byte a thread of a warpgroup at once."""

MAX_EXTENT = 256
"""Most elements of a bulk copy along one axis."""

WORTHWHILE_BYTES = 1152
"""Least tile that bulk copies are chosen for where there is a choice: the least that was measured to win.

On an H200, rows of 1,152 bytes are written at 3,363 GB/s, by registers at 2,964; runs of 512 bytes are packed at 1,968
and 3,319, of 256 bytes written at 1,068 and 3,374 (`docs/layouts.md`). Starting and storing a tile costs about 90
instructions in each of four warps, whatever its size.
"""

STAGE_BYTES = 16 * 1024
"""Most bytes of one stage: three programs of four stages share the 227 KiB of a multiprocessor."""

MAX_STAGES = 4
"""Most stages of a ring: one less than so many loads are under way at once."""

PROGRAMS = 132 * 3
"""Programs that a launch has at least, where there are so many tiles: three for each multiprocessor of an H200."""

MAX_TASKS = 16
"""Most tiles that one program moves."""

MAX_MOVES = 16
"""Most moves of one launch: each has its own branch in the kernel, and compile time grows with them."""


@dataclasses.dataclass(frozen=True)
class TmaTiles:
    """A run as equal tiles of a few lines; a line never crosses the end of a unit, so runs start at lines.

    Attributes:
      words: words of a line.
      lines: lines of a tile.
      count: tiles of a run.
      lines_per_row: lines of a unit, of which starts are counted.
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


def common_tiles(units: Sequence[int], lengths: Sequence[int], word_bytes: int) -> list[TmaTiles] | None:
    """Tiles of several kinds of runs, all of one shape; None where no bulk copy can move them all.

    For each kind, `units` are the words that starts count and `lengths` the words of a run, whole units.
    """
    # One tile shape for all moves of a launch: the ring in shared memory has stages of one size.
    unit, length = math.gcd(*units), math.gcd(*lengths)
    fitting = [w for w in range(1, MAX_EXTENT + 1) if unit % w == 0 and w * word_bytes % LINE_MULTIPLE_BYTES == 0]
    if word_bytes > 4:
        return None
    shapes = [(words * lines, words, lines) for words in fitting for lines in _lines(words, length, word_bytes)]
    if not shapes:
        return None
    # The largest tile; of equal ones, the longest line: fewer lines, fewer instructions in the copy engine.
    _, words, lines = max(shapes)
    return [
        TmaTiles(words, lines, each // words // lines, start // words)
        for start, each in zip(units, lengths, strict=True)
    ]


def _lines(words: int, length: int, word_bytes: int) -> list[int]:
    """Lines of `words` words that a tile of runs of `length` words may have."""
    limit = min(MAX_EXTENT, STAGE_BYTES // (words * word_bytes))
    whole = length // words
    return [n for n in range(1, limit + 1) if whole % n == 0 and n * words * word_bytes % TILE_MULTIPLE_BYTES == 0]


def tma_tiles(row: int, rows_per_run: int, word_bytes: int) -> TmaTiles | None:
    """Tiles of runs of `rows_per_run` rows of `row` words of `word_bytes`; None where no bulk copy can move them."""
    found = common_tiles([row], [row * rows_per_run], word_bytes)
    return None if found is None else found[0]


def required_tiles(units: Sequence[int], lengths: Sequence[int], word_bytes: int) -> list[TmaTiles]:
    """`common_tiles`, of runs that bulk copies can move; ValueError if none can."""
    tiles = common_tiles(units, lengths, word_bytes)
    if tiles is None:
        expected = f"lines of a multiple of {LINE_MULTIPLE_BYTES} bytes in tiles of a multiple of {TILE_MULTIPLE_BYTES}"
        runs = ", ".join(f"{length} of {unit}" for unit, length in zip(units, lengths, strict=True))
        raise ValueError(f"runs of {runs} words of {word_bytes} bytes: expected {expected}")
    return tiles


def tasks_per_program(tasks: int) -> int:
    """Tiles that one program moves: few enough that every multiprocessor has some, at most `MAX_TASKS`."""
    return min(max(-(-tasks // PROGRAMS), 1), MAX_TASKS)

"""How a row is cut into tiles that the Tensor Memory Accelerator (Hopper and later) moves in one copy."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

TILE_MULTIPLE_BYTES = 128
"""A tile is a multiple of this: JAX 0.10 copies no less than one byte a thread of a warpgroup at once."""

MAX_EXTENT = 256
"""Most elements of a bulk copy along one axis."""

STAGE_BYTES = 32 * 1024
"""Most bytes of one stage of the ring in shared memory."""

NUM_STAGES = 4
"""Stages of the ring: so many loads are under way at once."""

TASKS_PER_PROGRAM = 16
"""Tiles that one program moves through its ring, at most."""


@dataclasses.dataclass(frozen=True)
class TmaTiles:
    """A row as equal tiles `[lines, words]`.

    Attributes:
      lines: outer extent of a tile.
      words: inner extent, in words of `dtype`.
      count: tiles in a row.
      dtype: the word that moves; bits only, so any dtype of that size will do.
    """

    lines: int
    words: int
    count: int
    dtype: jnp.dtype

    def view(self, rows: jax.Array) -> jax.Array:
        """Rows `[n, row]` of words of any dtype as tiles `[n * count, lines, words]`, without a copy."""
        flat = rows.reshape(rows.shape[0], -1)
        ratio = self.dtype.itemsize // flat.dtype.itemsize
        if ratio > 1:
            flat = flat.reshape(flat.shape[0], -1, ratio)
        wide = jax.lax.bitcast_convert_type(flat, self.dtype)
        return wide.reshape(rows.shape[0] * self.count, self.lines, self.words)

    def unview(self, tiles: jax.Array, dtype: jnp.dtype, row: int) -> jax.Array:
        """The inverse of `view`: `[n, row]` of `dtype`."""
        count = tiles.shape[0] // self.count
        narrow = jax.lax.bitcast_convert_type(tiles.reshape(count, -1), dtype)
        return narrow.reshape(count, row)


def tma_tiles(row_bytes: int, word_bytes: int) -> TmaTiles | None:
    """Tiles for rows of so many bytes, given as words of `word_bytes`; None where no bulk copy can move such a row."""
    if row_bytes % TILE_MULTIPLE_BYTES or word_bytes > 4:
        return None
    dtype = jnp.dtype(jnp.uint32)
    words = row_bytes // dtype.itemsize
    inner = max(w for w in range(4, MAX_EXTENT + 1, 4) if words % w == 0)
    lines = words // inner
    limit = min(MAX_EXTENT, STAGE_BYTES // (inner * dtype.itemsize))
    line_bytes = inner * dtype.itemsize
    whole = [n for n in range(1, limit + 1) if lines % n == 0 and n * line_bytes % TILE_MULTIPLE_BYTES == 0]
    return TmaTiles(max(whole), inner, lines // max(whole), dtype) if whole else None

"""How a row is cut into the power-of-two tiles that Triton's array operations need."""

from __future__ import annotations

import dataclasses

TILE_BYTES = 2048
"""Bytes that one program moves: 16 for each of 128 threads."""

NUM_WARPS = 4


@dataclasses.dataclass(frozen=True)
class Tiles:
    """A row as tiles: the last one may hang over, and is masked.

    Attributes:
      width: words in a tile, a power of two.
      count: tiles in a row.
    """

    width: int
    count: int


def tiles_of(row_words: int, word_bytes: int) -> Tiles:
    """Tiles for rows of that many words of that many bytes."""
    width = max(TILE_BYTES // word_bytes, 1)
    smallest = 1 << (row_words - 1).bit_length()
    width = min(width, smallest)
    return Tiles(width, -(-row_words // width))

"""Division of a run into the power-of-two tiles that Triton's array operations need."""

from __future__ import annotations

import dataclasses

import jax

TILE_BYTES = 2048
"""Bytes that one program moves: 16 for each of 128 threads."""

NUM_WARPS = 4

MAX_POOLS = 32
"""Most pools of one launch: each has its own branch in the kernel, and compile time grows with them."""

MAX_TILES = 65535
"""CUDA's limit on the grid's second and third axis."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """A run as tiles: the last one may hang over, and is masked.

    Attributes:
      width: words in a tile, a power of two.
      count: tiles in a run.
    """

    width: int
    count: int


def tiles_of(run_words: int, word_bytes: int) -> Tiles:
    """Tiles for runs of that many words of that many bytes."""
    smallest = 1 << (run_words - 1).bit_length()
    width = min(max(TILE_BYTES // word_bytes, 1), smallest)
    return Tiles(width, -(-run_words // width))


def addressable(array: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """True if Pallas on Triton addresses an array rightly: it counts words in 32 bits below 4 GiB, whatever their size.

    False for arrays of more than 2**31 words and at most 4 GiB, which are those of bytes.
    """
    return array.size <= 2**31 or array.size * array.dtype.itemsize > 2**32


def check_addressable(*arrays: jax.Array | jax.ShapeDtypeStruct) -> None:
    """Refuses what Pallas on Triton addresses wrongly.

    Raises:
      ValueError: an array that is not `addressable`.
    """
    for array in arrays:
        if not addressable(array):
            raise ValueError(f"{array.dtype}{list(array.shape)}: expected words of 2 or 4 bytes from 2 GiB to 4 GiB")

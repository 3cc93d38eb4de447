"""Division of runs into, or their union to, the power-of-two tiles that Triton's array operations need.

A program moves about 2 KiB, 16 bytes a thread: a long run is cut into tiles side by side, of short ones several share a
program. What sticks out of a run is masked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from pallas_kernels.move.moves import Move

TILE_BYTES = 2048
"""Bytes that one program moves: 16 for each of 128 threads."""

NUM_WARPS = 4

MAX_MOVES = 32
"""Most moves of one launch: each has its own branch in the kernel, and compile time grows with them."""


@dataclasses.dataclass(frozen=True)
class Share:
    """The programs of a launch that belong to one move, and what each of them moves.

    Attributes:
      first: the first of them.
      runs: runs of a program, a power of two.
      width: words of each that it moves, a power of two.
      tiles: programs of the same runs, side by side.
      programs: their number.
    """

    first: int
    runs: int
    width: int
    tiles: int
    programs: int


def shares_of(moves: Sequence[Move], word_bytes: Sequence[int]) -> list[Share]:
    """The programs of each move, one after the other, each of at most `TILE_BYTES`."""
    found: list[Share] = []
    for move, itemsize in zip(moves, word_bytes, strict=True):
        most = max(TILE_BYTES // itemsize, 1)
        # Triton's arrays have power-of-two sizes: a short run gets the next one, and its program several runs.
        width = min(most, 1 << (move.length - 1).bit_length())
        tiles = -(-move.length // width)
        runs = most // width
        first = found[-1].first + found[-1].programs if found else 0
        found.append(Share(first, runs, width, tiles, -(-move.runs // runs) * tiles))
    return found


def addressable(array: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """True if Pallas on Triton addresses an array rightly: it counts words in 32 bits below 4 GiB, whatever their size.

    False for arrays of more than 2**31 words and at most 4 GiB, which are those of bytes.
    """
    return array.size <= 2**31 or array.size * array.dtype.itemsize > 2**32


def check_addressable(*arrays: jax.Array | jax.ShapeDtypeStruct) -> None:
    """Refuses what Pallas on Triton addresses wrongly: ValueError for an array that is not `addressable`."""
    for array in arrays:
        if not addressable(array):
            raise ValueError(f"{array.dtype}{list(array.shape)}: expected words of 2 or 4 bytes from 2 GiB to 4 GiB")

"""One kind of movement of a launch: runs of one length from an array of words into another.

Gathering, scattering, copying and zeroing blocks differ only in which side has a table of starts, and whether anything
is read at all. Kernels know words, never what they mean: bytes are moved as bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LARGEST = MappingProxyType({"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0})
"""Largest magnitude of each element type that numbers are quantised to."""


def saturated(scaled: jax.Array, dtype: str, rounded: Callable[[jax.Array], jax.Array] = jnp.round) -> jax.Array:
    """Float32 as numbers of `dtype`, the largest of it for those beyond; `rounded` is to nearest even, for integers."""
    most = np.float32(LARGEST[dtype])
    # Before the cast, which gives NaN or infinity for what is beyond float8, where the engines' kernels saturate. A NaN
    # passes through minimum and maximum, and float8 keeps it.
    clipped = jnp.minimum(jnp.maximum(scaled, -most), most)
    return (rounded(clipped) if dtype == "int8" else clipped).astype(jnp.dtype(dtype))


@dataclasses.dataclass(frozen=True, eq=False)
class Move:
    """Runs of one length, from one array into another, or within one if no run that is written is read.

    Starts are int32 and count units. A run whose start is outside the array that it is written to, or in part, moves
    nothing, and neither does one that is outside what is read, unless `zeros` says otherwise.

    Attributes:
      source: index of the array that is read; None where nothing is, and zeros are written.
      target: index of the array that is written.
      read: int32 `[runs]`, where each run starts in the source; None where run `i` is the `i`-th stretch of `length`.
      written: int32 `[runs]`, where it goes in the target, no run onto another; None as for `read`.
      runs: number of runs.
      unit: words that one start counts; a divisor of both arrays' sizes.
      length: words of a run, whole units.
      zeros: reads from outside the source give zeros, which are written.
      own: the target itself is read, no array among the sources.
      page: units of a page, where starts are int32 `[runs, 2]`, a page and a unit in it, as units are too many for 32
        bits; no run crosses a page. Kernels do not take such moves.
      reciprocal: float32 `[runs]`, what the numbers of each run are multiplied by, if they are quantised on their way:
        the source then has numbers, one for each word of the target, which is of bytes.
      dtype: the element type that they become; only with `reciprocal`.
    """

    source: int | None
    target: int
    read: jax.Array | None
    written: jax.Array | None
    runs: int
    unit: int
    length: int
    zeros: bool = False
    own: bool = False
    page: int = 0
    reciprocal: jax.Array | None = None
    dtype: str = ""

    @property
    def reads(self) -> bool:
        """True if there is something to read."""
        return self.own or self.source is not None

    def array(self, sources: Sequence[Any], targets: Sequence[Any]) -> Any:
        """The one that is read, among arrays or what stands for them; the target where nothing is."""
        return targets[self.target] if self.source is None else sources[self.source]

    def nbytes(self, targets: Any) -> int:
        """Bytes that are written if every run is inside."""
        return self.runs * self.length * targets[self.target].dtype.itemsize

    def quantised(self, numbers: jax.Array, reciprocal: jax.Array, rounded: Callable[[jax.Array], jax.Array]) -> Any:
        """Numbers times the reciprocal of their scale, rounded to nearest even and saturated, as words of a byte.

        `rounded` rounds float32 to nearest even, for integers.
        """
        found = saturated(numbers.astype(jnp.float32) * reciprocal, self.dtype, rounded)
        return lax.bitcast_convert_type(found, jnp.uint8)


def kernel_name(moves: Sequence[Move], targets: Any, sources: Any = ()) -> str:
    """The name of a launch, which says how many bytes it moves, or zeroes: nothing else in a compiled program does."""
    total = sum(move.nbytes(targets) for move in moves)
    name = f"{'move' if any(move.reads for move in moves) else 'zero'}_runs_of_{total}_bytes"
    if not any(move.dtype for move in moves):
        return name
    # Zeros are made, not read; quantised numbers are read in their own, larger type.
    read = [
        move.nbytes(targets) * (sources[move.source].dtype.itemsize if move.dtype and move.source is not None else 1)
        for move in moves
        if move.reads
    ]
    return f"{name}_from_{sum(read)}"


def last_start(size: int, move: Move) -> int:
    """The last unit of an array of `size` words that a run of a move can start at; negative for none."""
    return (size - move.length) // move.unit

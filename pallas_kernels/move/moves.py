"""One kind of movement of a launch: runs of one length from an array of words into another."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax


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
      page: units of a page, where starts are int32 `[runs, 2]`, a page and a unit in it, since units are too many for 32
        bits; no run crosses a page. Kernels do not take such moves.
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


def kernel_name(moves: Sequence[Move], targets: Any) -> str:
    """The name of a launch, which says how many bytes it moves, or zeroes: nothing else in a compiled program does."""
    total = sum(move.nbytes(targets) for move in moves)
    return f"{'move' if any(move.reads for move in moves) else 'zero'}_runs_of_{total}_bytes"


def last_start(size: int, move: Move) -> int:
    """The last unit of an array of `size` words that a run of a move can start at; negative if there is none."""
    return (size - move.length) // move.unit

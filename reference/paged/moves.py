"""Moving runs of words between arrays, run by run: the twin of `pallas_kernels.move`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hkv.layout.views.numpy import numpy_dtype
from reference.paged.quantization import convert


def move_runs(sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], moves: Sequence[Any]) -> None:
    """Copies every run of every move, in place.

    Args:
      sources: words, one axis each.
      targets: words, one axis each.
      moves: as `pallas_kernels.move.moves.Move` describes them; no run that is written is read.
    """
    for move in moves:
        target = targets[move.target]
        for run in range(move.runs):
            write = _start(move, move.written, run)
            if not _inside(write, move.length, target):
                continue
            words = np.zeros(move.length, target.dtype)
            if move.own or move.source is not None:
                source = target if move.source is None else sources[move.source]
                read = _start(move, move.read, run)
                if _inside(read, move.length, source):
                    words = source[read : read + move.length].copy()
                    if move.dtype:
                        scaled = words.astype(np.float32) * np.float32(move.reciprocal[run])
                        words = convert(scaled, numpy_dtype(move.dtype)).view(np.uint8)
                elif not move.zeros:
                    continue
            target[write : write + move.length] = words


def _start(move: Any, table: Any, run: int) -> int:
    """First word of a run; negative where its table says so."""
    if table is None:
        return run * move.length
    if not move.page:
        return int(table[run]) * move.unit
    page, unit = (int(number) for number in table[run])
    return (page * move.page + unit) * move.unit if unit >= 0 else -1


def _inside(start: int, length: int, array: np.ndarray) -> bool:
    return start >= 0 and start + length <= array.size

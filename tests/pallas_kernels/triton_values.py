"""Runs Triton's own interpreter over the Triton kernels, against loops: `TRITON_INTERPRET=1 python -m ...`.

A process of its own, because the variable has to be set before the kernels are defined. PyTorch on a CPU holds the
arrays.
"""

from __future__ import annotations

import numpy as np
import torch

import reference.paged.moves as reference
from pallas_kernels import triton_source as source
from pallas_kernels.move.moves import Move, last_start
from pallas_kernels.triton_tiles import shares_of
from tests.pallas_kernels import cases

STARTS = np.int32([0, 4, *cases.WRONG, 2])
PLACES = np.int32([5, -1, *cases.WRONG, 3])


def constants(move, share, words):
    """As `pallas_kernels.move.triton.constants`, whose module needs jax-triton."""
    return {
        "runs": move.runs,
        "unit": move.unit,
        "length": move.length,
        "width": share.width,
        "together": share.runs,
        "tiles": share.tiles,
        "last_read": last_start(words, move),
        "last_written": last_start(words, move),
        "has_read": move.read is not None,
        "has_written": move.written is not None,
        "zeros": move.zeros,
        "own": move.own,
        "reads": move.reads,
    }


def check(kernel, pointers, move, dtype):
    size = max(cases.NUM_ROWS * move.unit, move.runs * move.length)
    arrays = [cases.random_words((size,), dtype, seed) for seed in (1, 2)]
    expected = [arrays[1].copy()]
    reference.move_runs(arrays[:1], expected, [move])
    given, target = (torch.from_numpy(array.copy()) for array in arrays)
    nothing = torch.zeros(1, dtype=torch.int32)
    tables = [nothing if table is None else torch.from_numpy(table) for table in (move.read, move.written)]
    (share,) = shares_of([move], [given.element_size()])
    kernel[(share.programs,)](*tables, given, *[target] * pointers, **constants(move, share, size))
    assert target.numpy().tobytes() == expected[0].tobytes(), (kernel, move)


def main() -> int:
    checked = 0
    kernels = ((source.move_kernel, 1), (source.move_kernel_of_two_pointers, 2))
    for unit, units, dtype in [(132, 1, np.uint8), (656, 2, np.uint8), (576, 1, np.int16), (256, 1, np.int32)]:
        runs, length = STARTS.size, unit * units
        for move in (
            Move(0, 0, STARTS, None, runs, unit, length, zeros=True),
            Move(0, 0, None, PLACES, runs, unit, length),
            Move(0, 0, STARTS, PLACES, runs, unit, length),
            Move(None, 0, None, PLACES, runs, unit, length),
            Move(None, 0, np.int32([0, 1]), np.int32([6, 4]), 2, unit, length, own=True),
        ):
            for kernel, pointers in kernels:
                check(kernel, pointers, move, dtype)
                checked += 1
    print(f"{checked} kernels agree")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

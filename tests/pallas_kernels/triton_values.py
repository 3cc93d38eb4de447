"""Runs Triton's own interpreter over the Triton kernels, against loops: `TRITON_INTERPRET=1 python -m ...`.

A process of its own, because the variable has to be set before the kernels are defined. PyTorch on a CPU holds the
arrays.
"""

from __future__ import annotations

import numpy as np
import torch

from pallas_kernels import triton_source as source
from pallas_kernels.triton_tiles import tiles_of
from tests.pallas_kernels import cases


def main() -> int:
    checked = 0
    for row, rows_per_run, dtype in [(132, 1, np.uint8), (656, 2, np.uint8), (576, 1, np.int16), (256, 1, np.int32)]:
        pool = cases.random_words((cases.NUM_ROWS, row), dtype, 1)
        starts = np.int32([0, 4, *cases.WRONG, 2])
        length = row * rows_per_run
        tiles = tiles_of(length, pool.itemsize)
        constants = {"last": cases.NUM_ROWS - rows_per_run, "row": row, "length": length, "width": tiles.width}
        grid = (len(starts), tiles.count)
        shape = (1, len(starts), 1, rows_per_run, row)

        found = torch.full((len(starts), length), 77, dtype=torch.from_numpy(pool).dtype)
        source.gather_kernel[grid](torch.from_numpy(starts), torch.from_numpy(pool), found, **constants)
        expected = cases.gather_by_loops([pool], starts.reshape(1, -1, 1), rows_per_run)
        assert found.numpy().tobytes() == expected.tobytes(), ("gather", row)

        values = cases.random_words(shape, dtype, 2)
        after = cases.scatter_by_loops([pool], starts.reshape(1, -1, 1), values)[0]
        one = torch.from_numpy(pool.copy())
        flat = torch.from_numpy(values.reshape(len(starts), length))
        source.scatter_kernel[grid](torch.from_numpy(starts), flat, one, **constants)
        assert one.numpy().tobytes() == after.tobytes(), ("scatter", row)

        two = torch.from_numpy(pool.copy())
        kernel = source.scatter_kernel_of_two_pointers
        kernel[grid](torch.from_numpy(starts), flat, two, two, **constants)
        assert two.numpy().tobytes() == after.tobytes(), ("scatter of two pointers", row)
        checked += 3
    print(f"{checked} kernels agree")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

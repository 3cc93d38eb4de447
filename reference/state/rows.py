"""Rows of block ids under two indices, as plain lists: the twin of `hkv.block_tables.rows`."""

from __future__ import annotations

import numpy as np

from hkv.errors import OperationError

INT32_MAX = 2**31 - 1


class BlockRows:
    """One list of blocks a row, and one of kernel blocks, rebuilt from the first after every change.

    Args:
      num_rows: rows, one a request.
      width: slots per row, in blocks.
      ratio: kernel blocks per block.
      null: the id that stands for no block, 0 or -1.
    """

    def __init__(self, num_rows: int, width: int, *, ratio: int = 1, null: int = 0) -> None:
        self.width = width
        self.ratio = ratio
        self.null = null
        self.rows: list[list[int]] = [[] for _ in range(num_rows)]

    def kernel_row(self, row: int) -> list[int]:
        """The kernel blocks of a row, `ratio` a slot."""
        return [kernel for block in self.rows[row] for kernel in kernel_blocks(block, self.ratio)]

    def append(self, row: int, ids: list[int], count: int) -> None:
        """Append `ids[:count]`."""
        self._check_row(row)
        self._check_count(count, ids)
        self._check_length(len(self.rows[row]) + count)
        self._check_blocks(ids[:count])
        self.rows[row] += ids[:count]

    def append_all(self, ids: list[list[int]], counts: list[int]) -> list[OperationError | None]:
        """Append to every row; what refused each."""
        refusals: list[OperationError | None] = []
        for row, (row_ids, count) in enumerate(zip(ids, counts, strict=True)):
            try:
                self.append(row, row_ids, count)
                refusals.append(None)
            except OperationError as error:
                refusals.append(error)
        return refusals

    def assign(self, row: int, ids: list[int], count: int) -> None:
        """Make `ids[:count]` the whole row."""
        self._check_row(row)
        self._check_count(count, ids)
        self._check_length(count)
        self._check_blocks(ids[:count])
        self.rows[row] = ids[:count]

    def remove(self, row: int, positions: list[int], count: int) -> None:
        """Set slots to null; the length stays."""
        self._check_row(row)
        self._check_count(count, positions)
        self._check_positions(row, positions[:count])
        for position in positions[:count]:
            self.rows[row][position] = self.null

    def swap(self, row: int, first: int, second: int) -> None:
        """Exchange two slots."""
        self._check_row(row)
        self._check_positions(row, [first, second])
        blocks = self.rows[row]
        blocks[first], blocks[second] = blocks[second], blocks[first]

    def set_at(self, row: int, position: int, block: int) -> None:
        """Put a block, or null, into a slot."""
        self._check_row(row)
        self._check_positions(row, [position])
        self._check_blocks([block])
        self.rows[row][position] = block

    def resize(self, row: int, length: int, value: int) -> None:
        """Cut the row to `length` slots, or grow it with `value`."""
        self._check_row(row)
        self._check_length(length)
        missing = length - len(self.rows[row])
        if missing > 0:
            self._check_blocks([value])
        self.rows[row] = self.rows[row][:length] + [value] * max(missing, 0)

    def pop(self, row: int) -> int:
        """Take the last slot off and return its block."""
        self._check_row(row)
        if not self.rows[row]:
            raise OperationError("length", 0, "a row that is not empty")
        return self.rows[row].pop()

    def move(self, source: int, target: int) -> None:
        """Make row `target` what row `source` is, and empty `source`."""
        self._check_row(source)
        self._check_row(target)
        if source != target:
            self.rows[target], self.rows[source] = self.rows[source], []

    def tables(self, span: int) -> tuple[np.ndarray, np.ndarray]:
        """Zero-padded tables: int32[rows, width] and int32[rows, width * span]."""
        blocks = np.zeros((len(self.rows), self.width), np.int32)
        kernels = np.zeros((len(self.rows), self.width * span), np.int32)
        for row, values in enumerate(self.rows):
            blocks[row, : len(values)] = values
            kernel = self.kernel_row(row)
            kernels[row, : len(kernel)] = kernel
        return blocks, kernels

    def _check_row(self, row: int) -> None:
        if not 0 <= row < len(self.rows):
            raise OperationError("row", row, f"an index below {len(self.rows)}")

    def _check_count(self, count: int, values: list[int]) -> None:
        if not 0 <= count <= len(values):
            raise OperationError("count", count, f"0 to {len(values)}")

    def _check_length(self, length: int) -> None:
        if not 0 <= length <= self.width:
            raise OperationError("length", length, f"0 to {self.width}")

    def _check_positions(self, row: int, positions: list[int]) -> None:
        for position in positions:
            if not 0 <= position < len(self.rows[row]):
                raise OperationError("position", position, f"an index below {len(self.rows[row])}")

    def _check_blocks(self, blocks: list[int]) -> None:
        for block in blocks:
            if block == self.null:
                continue
            if block < 0 or block * self.ratio + self.ratio - 1 > INT32_MAX:
                raise OperationError("block", block, "null, or a block whose kernel blocks an int32 can name")


def kernel_blocks(block: int, ratio: int) -> list[int]:
    """The kernel blocks of one block; holes for a hole."""
    return [block] * ratio if block < 0 else [block * ratio + j for j in range(ratio)]

"""One request's blocks in one group, under two indices: the pool's blocks, and the kernels' smaller ones."""

from __future__ import annotations

from collections.abc import Iterable

from hkv.dialects.rtp_llm.config import NULL
from hkv.errors import OperationError
from reference.state.rows import kernel_blocks


class BlockIds:
    """RTP-LLM `BlockIds`. The kernels' list is always derived from the other, so that the two cannot disagree.

    Args:
      blocks: block ids, `NULL` for holes.
      ratio: kernel blocks per block.
    """

    def __init__(self, blocks: Iterable[int] = (), ratio: int = 1) -> None:
        self.blocks = list(blocks)
        self.ratio = max(1, ratio)

    def __len__(self) -> int:
        """Slots, holes included."""
        return len(self.blocks)

    @property
    def kernel(self) -> list[int]:
        """Kernel block ids, `ratio` a slot; a hole is as many holes."""
        return [kernel for block in self.blocks for kernel in kernel_blocks(block, self.ratio)]

    @property
    def real(self) -> list[int]:
        """The blocks without the holes."""
        return [block for block in self.blocks if block != NULL]

    def add(self, blocks: Iterable[int]) -> None:
        """Append slots."""
        self.blocks += blocks

    def assign(self, blocks: Iterable[int]) -> None:
        """Replace all slots."""
        self.blocks = list(blocks)

    def remove(self, positions: Iterable[int]) -> None:
        """Make holes; the length stays."""
        for position in positions:
            self.set_at(position, NULL)

    def swap(self, first: int, second: int) -> None:
        """Exchange two slots."""
        self._check(first)
        self._check(second)
        self.blocks[first], self.blocks[second] = self.blocks[second], self.blocks[first]

    def set_at(self, position: int, block: int) -> None:
        """Put a block, or `NULL`, into a slot."""
        self._check(position)
        self.blocks[position] = block

    def resize(self, length: int, value: int = NULL) -> None:
        """Cut to `length` slots, or grow with `value`."""
        self.blocks = self.blocks[:length] + [value] * (length - len(self.blocks))

    def pop(self) -> int:
        """Take the last slot off.

        Raises:
          OperationError: no id is free.
        """
        if not self.blocks:
            raise OperationError("blocks", [], "at least one slot")
        return self.blocks.pop()

    def _check(self, position: int) -> None:
        if not 0 <= position < len(self.blocks):
            raise OperationError("position", position, f"a slot below {len(self.blocks)}")

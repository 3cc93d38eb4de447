"""Full attention: the hit grows from the first block on; nothing retires."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from reference.dialects.vllm.kinds.kind import Kind, ceil_div
from reference.dialects.vllm.registration import register_partial
from reference.dialects.vllm.request import Request
from reference.keys.views import Chain, block_keys


class FullAttentionKind(Kind):
    """vLLM 0.33 `FullAttentionManager`."""

    fine_grained: ClassVar[bool] = True

    def find(
        self, keys: Sequence[Chain], max_length: int, groups: Sequence[int], drop: bool, alignment: int
    ) -> tuple[list[list[int]], int]:
        """Every block from the first on, then as many tokens of the next as are known, then drop, then align down."""
        size = self.block_size
        lists: list[list[int]] = [[] for _ in groups]
        whole = block_keys(keys, self.hash_block_size, size)
        for column in range(min(max_length // size, len(whole))):
            found = self.pool.find(whole[column], groups)
            if found is None:
                break
            _append(lists, found)
        hit = len(lists[0]) * size
        if alignment < size and size % alignment == 0:
            hit = self._look_inside(keys, max_length, groups, alignment, lists)
        if drop and hit > 0:
            hit -= min(alignment, size)
        hit -= hit % alignment
        for blocks in lists:
            del blocks[ceil_div(hit, size) :]
        return lists, hit

    def _look_inside(
        self, keys: Sequence[Chain], max_length: int, groups: Sequence[int], alignment: int, lists: list[list[int]]
    ) -> int:
        """The length that a partly filled block after the whole ones of `lists` extends the hit to; adds that block."""
        whole = len(lists[0])
        parts = self.block_size // alignment
        first = whole * parts
        for part in range(min(first + parts - 1, max_length // alignment, len(keys)) - 1, first - 1, -1):
            found = self.pool.find(keys[part], groups)
            if found is not None:
                _append(lists, found)
                return (part + 1) * alignment
        return whole * self.block_size

    def register(self, request: Request, tokens: int) -> None:
        """Full blocks, and then the prompt's tail: the last hash block of the prompt that a repeat could resume from.

        The request goes on writing behind that tail; what stands before it does not change.
        """
        super().register(request, tokens)
        if self.block_size == self.hash_block_size:
            return
        size = self.hash_block_size
        limit = request.num_prompt if self.eagle else request.num_prompt - 1
        tail = min(limit // size, len(request.keys)) * size
        blocks = self.row(request.id).blocks
        column = tail // self.block_size
        if tail == 0 or tail > tokens or tail % self.block_size == 0 or column >= len(blocks):
            return
        register_partial(self.pool, request, self.group, blocks[column], tail, size)


def _append(lists: list[list[int]], found: Sequence[int]) -> None:
    for blocks, block in zip(lists, found, strict=True):
        blocks.append(block)

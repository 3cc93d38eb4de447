"""Latter half under the reference: the longest aligned length whose latter half is known; the first half retires."""

from __future__ import annotations

from collections.abc import Sequence

from reference.dialects.vllm.kinds.kind import Kind, ceil_div
from reference.keys.views import Chain, block_keys
from reference.state.pool import NULL


class LatterHalfKind(Kind):
    """Managed as vLLM 0.33 manages local layers."""

    def skipped_tokens(self, n: int) -> int:
        return n // 2

    def admission_cap(self) -> int | None:
        most = self.config.max_model_len
        return ceil_div(min(ceil_div(most, 2) + self.config.in_flight_limit, most), self.spec.block_size) + 1

    def find(
        self, keys: Sequence[Chain], max_length: int, groups: Sequence[int], drop: bool, alignment: int
    ) -> tuple[list[list[int]], int]:
        """Looks from the end; columns of the first half are null. Under the drop the block behind is there too."""
        size = self.block_size
        whole = block_keys(keys, self.hash_block_size, size)
        known = [self.pool.find(key, groups) for key in whole[: max_length // size]]
        for end in range(len(known), 0, -1):
            length = end - drop
            first = length // 2
            if length * size % alignment == 0 and None not in known[first:end]:
                found = [blocks for blocks in known[first:length] if blocks]
                return [[NULL] * first + [blocks[i] for blocks in found] for i in range(len(groups))], length * size
        return [[] for _ in groups], 0

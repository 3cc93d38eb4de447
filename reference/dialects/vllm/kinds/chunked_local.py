"""Chunked local attention: a hit needs only the blocks of the chunk it ends in; earlier chunks retire."""

from __future__ import annotations

from collections.abc import Sequence

from hkv.errors import ConfigError
from hkv.spec import ChunkedLocal
from reference.dialects.vllm.kinds.kind import Kind, ceil_div
from reference.keys.views import Chain, block_keys
from reference.state.pool import NULL


class ChunkedLocalKind(Kind):
    """vLLM 0.33 `ChunkedLocalAttentionManager`."""

    droppable = False
    spec: ChunkedLocal

    def check(self, alone: bool) -> None:
        super().check(alone)
        if not alone and self.alignment != self.block_size:
            expected = f"the {self.alignment} tokens to which hits are aligned"
            raise ConfigError(f"groups[{self.group}].block_size", self.block_size, expected)

    def skipped_tokens(self, n: int) -> int:
        return n // self.spec.chunk * self.spec.chunk

    def admission_cap(self) -> int | None:
        held = self.spec.chunk + self.config.in_flight_limit
        return ceil_div(min(held, self.config.max_model_len), self.spec.block_size)

    def find(
        self, keys: Sequence[Chain], max_length: int, groups: Sequence[int], drop: bool, alignment: int
    ) -> tuple[list[list[int]], int]:
        """Null columns up to the chunk in which `max_length` lies, then its blocks for as long as they are known.

        Blocks of earlier chunks count as hit without being looked up: no query can read them.
        """
        size = self.block_size
        whole = block_keys(keys, self.hash_block_size, size)
        start = max(0, max_length) // self.spec.chunk * self.spec.chunk // size
        limit = max_length // size
        if "finder-index-error" not in self.config.bugs:
            limit = min(limit, len(whole))
        lists = [[NULL] * start for _ in groups]
        for column in range(start, limit):
            found = self.pool.find(whole[column], groups)
            if found is None:
                break
            for blocks, block in zip(lists, found, strict=True):
                blocks.append(block)
        return lists, len(lists[0]) * size

"""Own and previous chunk: a hit needs the blocks of both; earlier chunks retire. A kind of HKV's own."""

from __future__ import annotations

from collections.abc import Sequence

from hkv.spec.chunked_local import ChunkPair
from reference.dialects.vllm.kinds.kind import Kind, ceil_div
from reference.keys.views import Chain, block_keys
from reference.state.pool import NULL


class ChunkPairKind(Kind):
    """Managed as vLLM 0.33 manages local layers."""

    spec: ChunkPair

    def skipped_tokens(self, n: int) -> int:
        return (n // self.spec.chunk - 1) * self.spec.chunk

    def admission_cap(self) -> int | None:
        held = 2 * self.spec.chunk + self.config.in_flight_limit
        return ceil_div(min(held, self.config.max_model_len), self.spec.block_size)

    def find(
        self, keys: Sequence[Chain], max_length: int, groups: Sequence[int], drop: bool, alignment: int
    ) -> tuple[list[list[int]], int]:
        """The longest aligned length of which both chunks are known, and under the drop the block behind it too.

        Columns before the previous chunk are null.
        """
        size = self.block_size
        whole = block_keys(keys, self.hash_block_size, size)
        limit = max_length // size
        if "finder-index-error" not in self.config.bugs:
            limit = min(limit, len(whole))
        known = {}
        for end in range(limit, 0, -1):
            known[end - 1] = self.pool.find(whole[end - 1], groups)
        for end in range(limit, 0, -1):
            length = end - 1 if drop else end
            if length * size % alignment:
                continue
            first = max(0, self.skipped_tokens(length * size)) // size
            if all(known[column] is not None for column in range(first, end)):
                found = [known[column] for column in range(first, length)]
                return [[NULL] * first + [blocks[i] for blocks in found] for i in range(len(groups))], length * size
        return [[] for _ in groups], 0

"""Attention sinks plus a window: a hit needs the blocks of both; those between retire. A kind of HKV's own."""

from __future__ import annotations

from collections.abc import Sequence

from hkv.spec.sliding_window import SinkWindow
from reference.dialects.vllm.kinds.kind import Kind, ceil_div
from reference.keys.views import Chain, block_keys
from reference.state.pool import NULL


class SinkWindowKind(Kind):
    """Managed as vLLM 0.33 manages local layers, but for the sinks, which stay."""

    spec: SinkWindow

    def skipped_tokens(self, n: int) -> int:
        return n - self.spec.window + 1

    def admission_cap(self) -> int | None:
        held = min(self.spec.window - 1 + self.config.in_flight_limit, self.config.max_model_len)
        return ceil_div(self.spec.sink_len, self.block_size) + ceil_div(held, self.block_size) + 1

    def find(
        self, keys: Sequence[Chain], max_length: int, groups: Sequence[int], drop: bool, alignment: int
    ) -> tuple[list[list[int]], int]:
        """The longest aligned length of which sinks and window are known, and under the drop the block behind it too.

        Columns between are null.
        """
        size = self.block_size
        whole = block_keys(keys, self.hash_block_size, size)
        known = [self.pool.find(key, groups) for key in whole[: max_length // size]]
        for end in range(len(known), 0, -1):
            length = end - 1 if drop else end
            if length * size % alignment:
                continue
            skipped = self.skipped(length * size)
            if all(known[column] is not None for column in range(end) if column not in skipped):
                kept = [None if column in skipped else known[column] for column in range(length)]
                return [
                    [NULL if found is None else found[i] for found in kept] for i in range(len(groups))
                ], length * size
        return [[] for _ in groups], 0

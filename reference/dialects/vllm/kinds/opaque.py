"""Opaque state: one block a request from its first allocation to its end; never found, never given back early."""

from __future__ import annotations

from collections.abc import Sequence

from reference.dialects.vllm.kinds.kind import Demand, Kind
from reference.keys.views import Chain


class OpaqueKind(Kind):
    """vLLM 0.33 `CircularBufferManager`."""

    def find(
        self, keys: Sequence[Chain], max_length: int, groups: Sequence[int], drop: bool, alignment: int
    ) -> tuple[list[list[int]], int]:
        return [[] for _ in groups], 0

    def estimate(self, id: str, hit: Sequence[int], demand: Demand) -> int:
        row = self.rows.get(id)
        return 0 if row is not None and row.blocks else 1

    def adopt(self, id: str, hit: Sequence[int], local: int, external: int) -> None:
        """Adopts nothing: there is no hit to begin with."""

    def adopt_external(self, id: str, local: int, external: int, written: bool = False) -> None:
        self._claim(id)

    def allocate(self, id: str, slots: int, main: int) -> list[int]:
        return self._claim(id)

    def _claim(self, id: str) -> list[int]:
        row = self.row(id)
        if row.blocks:
            return []
        row.blocks = self.pool.take(1, self.group)
        return list(row.blocks)

    def retire(self, id: str, processed: int) -> None:
        """Retires nothing: the ring is written over, not outgrown."""

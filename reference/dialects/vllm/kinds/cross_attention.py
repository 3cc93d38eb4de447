"""Cross attention: blocks for an encoder's output, asked for once, and none for a request's tokens."""

from __future__ import annotations

from collections.abc import Sequence

from reference.dialects.vllm.kinds.kind import Demand, Kind
from reference.keys.views import Chain


class CrossAttentionKind(Kind):
    """vLLM 0.33 `CrossAttentionManager`, and what `KVCacheCoordinator` asks it for."""

    def concerning(self, demand: Demand) -> Demand:
        """The encoder's tokens, before which nothing was computed."""
        return demand._replace(slots=demand.encoder, main=demand.encoder, total=0, local=0, prefill_end=0)

    def find(
        self, keys: Sequence[Chain], max_length: int, groups: Sequence[int], drop: bool, alignment: int
    ) -> tuple[list[list[int]], int]:
        return [[] for _ in groups], 0

    def adopt(self, id: str, hit: Sequence[int], local: int, external: int) -> None:
        """Adopts nothing: there is no hit next to an encoder's output."""

    def adopt_external(self, id: str, local: int, external: int, written: bool = False) -> None:
        """Takes nothing: what comes from elsewhere are the request's own tokens."""

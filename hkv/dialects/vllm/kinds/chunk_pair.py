"""Own and previous chunk under the rules of vLLM 0.33, which has no such kind: a run from the previous chunk on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.kinds._attention import AttentionLayer
from hkv.spec import LayerSpec, RequestLimits
from hkv.spec.chunked_local import ChunkPair
from hkv.spec.layer import Draw


def parameters(config: VllmConfig, group: int, spec: ChunkPair, eagle: bool) -> dict[str, Any]:
    """A chunk before the own one, and the most that admission counts."""
    del group, eagle
    in_flight = min(2 * spec.chunk + config.in_flight_limit, config.max_model_len)
    blocks = spec.chunk // spec.block_size
    return {"UNIT": spec.chunk, "LOOKBACK": spec.chunk, "NEED": blocks, "CAP": -(-in_flight // spec.block_size)}


class ChunkPairLayer(AttentionLayer):
    """`hkv.spec.ChunkPair` under vLLM 0.33."""

    of: ClassVar[Any] = ChunkPair
    log_version: ClassVar[int] = 2
    draw_place: ClassVar[int] = 5
    seeks_run: ClassVar[bool] = True
    joins_latent: ClassVar[bool] = False

    @classmethod
    def draw(cls, choices: Draw, size: int, feature: str, ranks: int) -> dict[str, Any]:
        """A few blocks to a chunk."""
        return {**super().draw(choices, size, feature, ranks), "chunk": size * choices.pick((1, 2, 3, 4, 6))}

    def max_request_blocks(self, limits: RequestLimits) -> int:
        tokens = min(2 * self.spec.chunk + limits.max_in_flight_tokens, limits.max_model_len)
        return -(-tokens // self.spec.block_size)

    def held_blocks(self, start: int, end: int, limits: RequestLimits) -> int:
        return -(-end // self.spec.block_size) - self.spec.readable(start).start // self.spec.block_size

    def is_uniform_with(self, specs: Sequence[LayerSpec]) -> bool:
        """All of one chunk size."""
        return all(isinstance(spec, ChunkPair) and spec.chunk == self.spec.chunk for spec in specs)

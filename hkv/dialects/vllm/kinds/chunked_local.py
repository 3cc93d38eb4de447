"""Chunked local attention under vLLM 0.33 (`ChunkedLocalAttentionManager`): only the current chunk is looked up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.kinds._attention import AttentionLayer
from hkv.errors import ConfigError
from hkv.spec import ChunkedLocal, FullAttention, LayerSpec, RequestLimits
from hkv.spec.layer import Draw


def parameters(config: VllmConfig, group: int, spec: ChunkedLocal, eagle: bool) -> dict[str, Any]:
    """The chunk, and the most that admission counts.

    Raises:
      ConfigError: hits that end where the kind cannot resume.
    """
    if eagle:
        raise ConfigError(f"groups[{group}].eagle", True, f"no EAGLE drop for {spec.kind}")
    alone = len(config.topology.specs) == 1
    if config.caching and not alone and config.block_size(group) != config.hit_alignment:
        expected = f"the {config.hit_alignment} tokens to which hits are aligned"
        raise ConfigError(f"groups[{group}].block_size", config.block_size(group), expected)
    in_flight = min(spec.chunk + config.in_flight_limit, config.max_model_len)
    return {"UNIT": spec.chunk, "LOOKBACK": 0, "CAP": -(-in_flight // spec.block_size)}


class ChunkedLocalLayer(AttentionLayer):
    """`hkv.spec.ChunkedLocal` under vLLM 0.33."""

    of: ClassVar[Any] = ChunkedLocal
    vllm_name: ClassVar[str | None] = "ChunkedLocalAttentionSpec"
    vllm_fields: ClassVar[Mapping[str, str]] = MappingProxyType({"attention_chunk_size": "chunk"})
    managed_fields: ClassVar[tuple[str, ...]] = ("chunk",)
    draw_place: ClassVar[int] = 4
    aligned_blocks: ClassVar[bool] = True
    joins_latent: ClassVar[bool] = False
    droppable: ClassVar[bool] = False
    event_kind: ClassVar[str | None] = "chunked_local_attention"
    planned_weight: ClassVar[int] = 1

    @classmethod
    def draw(cls, choices: Draw, size: int, feature: str, ranks: int) -> dict[str, Any]:
        """A few blocks to a chunk, and now and then a token more."""
        chunk = size * choices.pick((1, 2, 4, 6, 12)) + choices.chance(10)
        return {**super().draw(choices, size, feature, ranks), "chunk": chunk}

    @classmethod
    def compared_weight(cls, aligned: bool) -> int:
        return 4 if aligned else 0

    @classmethod
    def draw_compared(cls, choices: Draw, size: int, ranks: int) -> LayerSpec:
        return cls.of(block_size=size, chunk=choices.integer(1, 3) * size + choices.chance(20))

    @classmethod
    def draw_planned(cls, choices: Draw) -> LayerSpec:
        fields = cls.draw_geometry(choices)
        fields["cp_sharded"] = False
        return cls.draw_padded(choices, cls.of(**fields, chunk=choices.pick((16, 64, 1024))))

    @classmethod
    def smallest(cls) -> tuple[LayerSpec, ...]:
        """Chunks of up to three tokens."""
        return tuple(cls.of(block_size=size, chunk=chunk) for size in (1, 2) for chunk in (1, 2, 3))

    @property
    def off_grid(self) -> bool:
        """True if chunks do not start at blocks."""
        return self.spec.chunk % self.spec.block_size != 0

    def as_full(self, block_size: int) -> LayerSpec:
        """Full attention that knows the chunk."""
        return FullAttention(**self.spec.full_fields(block_size), attention_chunk_size=self.spec.chunk)

    def max_request_blocks(self, limits: RequestLimits) -> int:
        tokens = min(self.spec.chunk + limits.max_in_flight_tokens, limits.max_model_len)
        return -(-tokens // self.spec.block_size)

    def held_blocks(self, start: int, end: int, limits: RequestLimits) -> int:
        first = start // self.spec.chunk * self.spec.chunk
        return -(-end // self.spec.block_size) - first // self.spec.block_size

    def is_uniform_with(self, specs: Sequence[LayerSpec]) -> bool:
        """All of one chunk size."""
        return all(isinstance(spec, ChunkedLocal) and spec.chunk == self.spec.chunk for spec in specs)

"""Chunked local attention: a query reads only the tokens of its own chunk."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from hkv.limits import check_positive
from hkv.spec.attention import AttentionSpec
from hkv.spec.full_attention import FullAttention
from hkv.spec.layer import Draw, LayerSpec

if TYPE_CHECKING:
    from hkv.spec.limits import RequestLimits


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedLocal(AttentionSpec):
    """A chunked-local layer, as in Llama 4 (vLLM 0.33 `ChunkedLocalAttentionSpec`).

    Attributes:
      chunk: tokens per attention chunk; the chunk of position n starts at `n // chunk * chunk`.
    """

    kind: ClassVar[str] = "chunked_local"
    short_name: ClassVar[str] = "chunked"
    vllm_name: ClassVar[str | None] = "ChunkedLocalAttentionSpec"
    vllm_fields: ClassVar[Mapping[str, str]] = MappingProxyType({"attention_chunk_size": "chunk"})
    managed_fields: ClassVar[tuple[str, ...]] = ("chunk",)
    parameters: ClassVar[tuple[str, ...]] = ("chunk",)
    log_fields: ClassVar[tuple[str, ...]] = ("chunk",)
    draw_place: ClassVar[int] = 4
    aligned_blocks: ClassVar[bool] = True
    joins_latent: ClassVar[bool] = False
    droppable: ClassVar[bool] = False
    event_kind: ClassVar[str | None] = "chunked_local_attention"
    planned_weight: ClassVar[int] = 1

    chunk: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "chunk")

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
        return cls(block_size=size, chunk=choices.integer(1, 3) * size + choices.chance(20))

    @classmethod
    def draw_planned(cls, choices: Draw) -> LayerSpec:
        fields = cls.draw_geometry(choices)
        fields["cp_sharded"] = False
        return cls(**fields, chunk=choices.pick((16, 64, 1024))).draw_padded(choices)

    @classmethod
    def smallest(cls) -> tuple[LayerSpec, ...]:
        """Chunks of up to three tokens."""
        return tuple(cls(block_size=size, chunk=chunk) for size in (1, 2) for chunk in (1, 2, 3))

    def readable(self, n: int) -> range:
        return range(n // self.chunk * self.chunk, n)

    @property
    def most_read(self) -> int:
        """`chunk`."""
        return self.chunk

    @property
    def off_grid(self) -> bool:
        """True if chunks do not start at blocks."""
        return self.chunk % self.block_size != 0

    def as_full(self, block_size: int) -> LayerSpec:
        """Full attention that knows the chunk."""
        return FullAttention(**self.full_fields(block_size), attention_chunk_size=self.chunk)

    def max_request_blocks(self, limits: RequestLimits) -> int:
        tokens = min(self.chunk + limits.max_in_flight_tokens, limits.max_model_len)
        return -(-tokens // self.block_size)

    def held_blocks(self, start: int, end: int, limits: RequestLimits) -> int:
        first = start // self.chunk * self.chunk
        return -(-end // self.block_size) - first // self.block_size

    def is_uniform_with(self, specs: Sequence[LayerSpec]) -> bool:
        """All of one chunk size."""
        return all(isinstance(spec, ChunkedLocal) and spec.chunk == self.chunk for spec in specs)

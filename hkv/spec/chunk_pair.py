"""Own and previous chunk: a query reads the tokens of its own chunk and of the one before. A kind of HKV's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from hkv.errors import SpecError
from hkv.limits import check_positive
from hkv.spec.attention import AttentionSpec
from hkv.spec.layer import Draw, LayerSpec

if TYPE_CHECKING:
    from hkv.spec.limits import RequestLimits


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkPair(AttentionSpec):
    """A layer whose attention overlaps neighbouring chunks, as block-local attention does; no engine's.

    Attributes:
      chunk: tokens per chunk, a multiple of the block; the chunk of position n starts at `n // chunk * chunk`.
    """

    kind: ClassVar[str] = "chunk_pair"
    short_name: ClassVar[str] = "chunk_pair"
    parameters: ClassVar[tuple[str, ...]] = ("chunk",)
    log_fields: ClassVar[tuple[str, ...]] = ("chunk",)
    log_version: ClassVar[int] = 2
    draw_place: ClassVar[int] = 5
    seeks_run: ClassVar[bool] = True
    joins_latent: ClassVar[bool] = False

    chunk: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "chunk")
        if self.chunk % self.block_size:
            raise SpecError("ChunkPair.chunk", self.chunk, f"a multiple of the block of {self.block_size} tokens")

    @classmethod
    def draw(cls, choices: Draw, size: int, feature: str, ranks: int) -> dict[str, Any]:
        """A few blocks to a chunk."""
        return {**super().draw(choices, size, feature, ranks), "chunk": size * choices.pick((1, 2, 3, 4, 6))}

    def readable(self, n: int) -> range:
        return range(max(0, n // self.chunk - 1) * self.chunk, n)

    @property
    def most_read(self) -> int:
        """Two chunks."""
        return 2 * self.chunk

    def max_request_blocks(self, limits: RequestLimits) -> int:
        tokens = min(2 * self.chunk + limits.max_in_flight_tokens, limits.max_model_len)
        return -(-tokens // self.block_size)

    def held_blocks(self, start: int, end: int, limits: RequestLimits) -> int:
        return -(-end // self.block_size) - self.readable(start).start // self.block_size

    def is_uniform_with(self, specs: Sequence[LayerSpec]) -> bool:
        """All of one chunk size."""
        return all(isinstance(spec, ChunkPair) and spec.chunk == self.chunk for spec in specs)

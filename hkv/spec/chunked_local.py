"""Chunked local attention: a query reads the tokens of its own chunk, or of the one before as well."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hkv.errors import SpecError
from hkv.limits import check_positive
from hkv.spec.attention import AttentionSpec
from hkv.spec.layer import Written


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedLocal(AttentionSpec):
    """A chunked-local layer, as in Llama 4 (vLLM 0.33 `ChunkedLocalAttentionSpec`).

    Attributes:
      chunk: tokens per attention chunk; the chunk of position n starts at `n // chunk * chunk`.
    """

    kind: ClassVar[str] = "chunked_local"
    written: ClassVar[Written] = Written("chunked", ("chunk",))
    chunk: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "chunk")

    def readable(self, n: int) -> range:
        return range(n // self.chunk * self.chunk, n)

    @property
    def most_read(self) -> int:
        """`chunk`."""
        return self.chunk


# Own and previous chunk: a query reads the tokens of its own chunk and of the one before. A kind of HKV's own.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkPair(AttentionSpec):
    """A layer whose attention overlaps neighbouring chunks, as block-local attention does; no engine's.

    Attributes:
      chunk: tokens per chunk, a multiple of the block; the chunk of position n starts at `n // chunk * chunk`.
    """

    kind: ClassVar[str] = "chunk_pair"
    written: ClassVar[Written] = Written("chunk_pair", ("chunk",))
    chunk: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "chunk")
        if self.chunk % self.block_size:
            raise SpecError("ChunkPair.chunk", self.chunk, f"a multiple of the block of {self.block_size} tokens")

    def readable(self, n: int) -> range:
        return range(max(0, n // self.chunk - 1) * self.chunk, n)

    @property
    def most_read(self) -> int:
        """Two chunks."""
        return 2 * self.chunk

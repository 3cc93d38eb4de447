"""Chunked local attention: a query reads only the tokens of its own chunk."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

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

"""Full attention: every query reads every earlier token."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hkv.spec.attention import AttentionSpec
from hkv.spec.layer import Written


@dataclasses.dataclass(frozen=True, kw_only=True)
class FullAttention(AttentionSpec):
    """A full-attention layer (vLLM 0.33 `FullAttentionSpec`).

    Attributes:
      sliding_window: window of a local layer that was promoted to full caching, in tokens, or None.
      attention_chunk_size: chunk of a local layer that was promoted to full caching, in tokens, or None.
      non_causal: the layer also attends to later tokens; it changes no byte of the cache.
    """

    kind: ClassVar[str] = "full_attention"
    written: ClassVar[Written] = Written("full", (), ("cp_sharded",))
    reads_all: ClassVar[bool] = True
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    non_causal: bool = False

    def readable(self, n: int) -> range:
        return range(0, n)

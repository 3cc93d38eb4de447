"""Multi-head latent attention: one compressed latent a token, read by every later query."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hkv.spec.full_attention import FullAttention


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLAAttention(FullAttention):
    """A multi-head latent attention layer, or its sparse indexer (vLLM 0.33 `MLAAttentionSpec`).

    `head_size` counts the latent and the rotary part together; there is no separate value.

    Attributes:
      cache_dtype: the packing's name as the engine knows it, e.g. `fp8_ds_mla`, or None.
      cache_role: `sparse`, `indexer`, or None for the ordinary latent.
      alignment: bytes to which the page is rounded up, or None; when it changes the page it overwrites
        `page_size_padded` (vLLM 0.33).
    """

    kind: ClassVar[str] = "mla"
    short_name: ClassVar[str] = "mla"

    head_size_v: int | None = 0
    cache_dtype: str | None = None
    cache_role: str | None = None
    alignment: int | None = None

    def __post_init__(self) -> None:
        if self.alignment is not None and self.alignment > 0:
            rounded = -(-self.unpadded_page_size_bytes // self.alignment) * self.alignment
            if rounded != self.unpadded_page_size_bytes:
                object.__setattr__(self, "page_size_padded", rounded)
        super().__post_init__()

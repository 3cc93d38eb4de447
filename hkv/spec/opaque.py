"""Opaque state: a fixed region a request owns, of which the cache knows only the size."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hkv.limits import MAX_BYTES, check_positive
from hkv.spec.layer import LayerSpec, Written


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpaqueState(LayerSpec):
    """A ring of the last `block_size` tokens' worth of state: one block a request, never shared.

    vLLM 0.33 calls it `CircularBufferSpec`; RTP-LLM's opaque state pools are of this kind.

    Attributes:
      entry_bytes: bytes per token slot of the ring.
      page_size_padded: bytes a page takes up when padded, or None.
    """

    kind: ClassVar[str] = "opaque"
    written: ClassVar[Written] = Written("opaque")
    one_block: ClassVar[bool] = True
    prefix_cacheable: ClassVar[bool] = False
    entry_bytes: int = 1
    page_size_padded: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "entry_bytes", most=MAX_BYTES)
        if self.page_size_padded is not None:
            check_positive(self, "page_size_padded", most=MAX_BYTES)

    def readable(self, n: int) -> range:
        return range(max(0, n - self.block_size), n)

    def states_in(self, tokens: int) -> int:
        """States that a ring of `tokens` tokens holds: one entry each."""
        return tokens

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of the ring that carry data."""
        return self.block_size * self.entry_bytes

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer, padding included."""
        payload = self.unpadded_page_size_bytes
        return payload if self.page_size_padded is None else max(payload, self.page_size_padded)

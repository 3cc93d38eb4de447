"""Latent attention behind a window: one vector a token, of which only the last few are read."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Self

from hkv.spec.layer import Written
from hkv.spec.mla import aligned_page
from hkv.spec.sliding_window import SlidingWindow


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlidingWindowMLA(SlidingWindow):
    """A sliding-window layer in the latent format, as in DeepSeek-V4 (vLLM 0.33 `SlidingWindowMLASpec`).

    Managed like a sliding window, hence of the same `kind`; only its bytes differ.

    Attributes:
      cache_dtype: the packing's name as the engine knows it, or None.
      alignment: bytes to which the page is rounded up, or None; larger padding stands.
      model_version: variant of the packing, e.g. `deepseek_v4`, or None.
    """

    single_vector: ClassVar[bool] = True
    written: ClassVar[Written] = dataclasses.replace(SlidingWindow.written, variant="latent")
    head_size_v: int | None = 0
    cache_dtype: str | None = None
    alignment: int | None = None
    model_version: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "page_size_padded", aligned_page(self, self.alignment, self.page_size_padded))
        super().__post_init__()

    def page_bytes_of(self, tokens: int) -> int:
        """Bytes of a page cut down to `tokens` tokens, aligned like the whole one."""
        page = self.num_heads * self.states_in(tokens) * self.content_bytes
        if self.alignment is not None and page % self.alignment:
            return -(-page // self.alignment) * self.alignment
        return page if self.page_size_padded is None else self.page_size_padded

    def with_block_size(self, block_size: int) -> Self:
        """The same layer with another number of tokens per block, aligned anew."""
        if self.alignment is None:
            return super().with_block_size(block_size)
        return dataclasses.replace(self, block_size=block_size, page_size_padded=None)

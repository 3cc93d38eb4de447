"""Latent attention behind a window: one vector a token, of which only the last few are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, Self

from hkv.spec.attention import all_of, same_attention, unique
from hkv.spec.layer import Draw, LayerSpec
from hkv.spec.mla import MLAAttention, aligned_page, draw_latent
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
    planned_weight: ClassVar[int] = 1
    joins_latent: ClassVar[bool] = False
    log_variant: ClassVar[str] = "latent"
    event_kind: ClassVar[str | None] = "sliding_window_mla"
    vllm_name: ClassVar[str | None] = "SlidingWindowMLASpec"
    vllm_fields: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "sliding_window": "window",
            "extra_retained_tokens": "extra_retained_tokens",
            "cache_dtype_str": "cache_dtype",
            "alignment": "alignment",
            "model_version": "model_version",
        }
    )

    head_size_v: int | None = 0
    cache_dtype: str | None = None
    alignment: int | None = None
    model_version: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "page_size_padded", aligned_page(self, self.alignment, self.page_size_padded))
        super().__post_init__()

    @classmethod
    def draw_planned(cls, choices: Draw) -> LayerSpec:
        fields = draw_latent({**cls.draw_geometry(choices), "cp_sharded": False}, choices)
        return cls(**fields, window=choices.pick((8, 16, 128)))

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

    def as_full(self, block_size: int) -> LayerSpec:
        """A latent layer that knows the window, aligned anew."""
        fields = self.full_fields(block_size)
        if self.alignment is not None:
            fields["page_size_padded"] = None
        return MLAAttention(
            **fields,
            sliding_window=self.window,
            cache_dtype=self.cache_dtype,
            alignment=self.alignment,
            model_version=self.model_version,
        )

    def is_uniform_with(self, specs: Sequence[LayerSpec]) -> bool:
        """All latent and of one window."""
        return all(isinstance(spec, SlidingWindowMLA) and spec.window == self.window for spec in specs)

    @classmethod
    def merge(cls, specs: Sequence[LayerSpec], bugs: frozenset[str] = frozenset()) -> LayerSpec:
        """One packing, compression, window and geometry; the alignment is dropped (vLLM 0.33 `merge`)."""
        all_of(specs, SlidingWindowMLA)
        unique(specs, "cache_dtype", "tokens_per_state", "model_version", "window", "extra_retained_tokens")
        unique(specs, "block_stride_alignment", "cp_sharded", "max_tp_shards")
        first = specs[0]
        assert isinstance(first, SlidingWindowMLA)
        if "window-latent-merge" in bugs:
            return dataclasses.replace(first, alignment=None, quantization="none", head_size_v=0, is_draft=False)
        same_attention(specs)
        return dataclasses.replace(first, alignment=None, is_draft=False)

"""Sliding-window attention under vLLM 0.33 (`SlidingWindowManager`): the last run of blocks that fills the window."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from hkv.dialects.vllm.config import UNLIMITED, VllmConfig
from hkv.dialects.vllm.kinds._attention import AttentionLayer, all_of, same_attention, unique
from hkv.dialects.vllm.kinds.mla import draw_latent
from hkv.errors import SpecError
from hkv.spec import FullAttention, LayerSpec, MLAAttention, RequestLimits, SlidingWindow, SlidingWindowMLA
from hkv.spec.layer import Draw


def parameters(config: VllmConfig, group: int, spec: SlidingWindow, eagle: bool) -> dict[str, Any]:
    """The window's lookback, the blocks it needs, and the most that admission counts."""
    kept = spec.window - 1 + spec.extra_retained_tokens
    in_flight = min(kept + config.in_flight_limit, config.max_model_len)
    need = -(-(spec.window - 1) // config.block_size(group))
    keep = need + eagle
    free = spec.window == 1 and "window-one-never-hits" not in config.bugs
    return {
        "LOOKBACK": kept,
        "NEED": -1 if free else need,
        "PERIOD": _period(config, group, keep),
        "KEEP": keep,
        "SHIFT": eagle,
        "CAP": -(-in_flight // spec.block_size) + 1,
    }


def _period(config: VllmConfig, group: int, keep: int) -> int:
    """Blocks between two lengths before which the last `keep` are kept; 0 if that is all of them."""
    block, interval = config.block_size(group), config.retention_interval
    if config.hit_alignment % block:
        return 0
    if interval == 0:
        return UNLIMITED
    period = (interval or config.hit_alignment) // block
    return 0 if keep >= period else period


class SlidingWindowLayer(AttentionLayer):
    """`hkv.spec.SlidingWindow` under vLLM 0.33."""

    of: ClassVar[Any] = SlidingWindow
    vllm_name: ClassVar[str | None] = "SlidingWindowSpec"
    vllm_fields: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"sliding_window": "window", "extra_retained_tokens": "extra_retained_tokens"}
    )
    managed_fields: ClassVar[tuple[str, ...]] = ("window", "extra_retained_tokens")
    later_log_fields: ClassVar[Mapping[str, int]] = MappingProxyType({"extra_retained_tokens": 3})
    draw_place: ClassVar[int] = 1
    seeks_run: ClassVar[bool] = True
    event_kind: ClassVar[str | None] = "sliding_window"
    planned_weight: ClassVar[int] = 2

    @classmethod
    def draw_weight(cls, feature: str, version: int) -> int:
        return 0 if feature == "partial" else 2

    @classmethod
    def draw(cls, choices: Draw, size: int, feature: str, ranks: int) -> dict[str, Any]:
        """Windows around the block size, and some far smaller and larger."""
        windows = (1, 2, max(1, size - 1), size, size + 1, 2 * size, 4, 7, 8, 16, 24, 500)
        return {**super().draw(choices, size, feature, ranks), "window": choices.pick(windows)}

    @classmethod
    def compared_weight(cls, aligned: bool) -> int:
        return 3

    @classmethod
    def draw_compared(cls, choices: Draw, size: int, ranks: int) -> LayerSpec:
        return cls.of(block_size=size, window=choices.integer(1, 3 * size + 2))

    @classmethod
    def draw_planned(cls, choices: Draw) -> LayerSpec:
        fields = cls.draw_geometry(choices)
        fields["cp_sharded"] = False
        return cls.draw_padded(choices, cls.of(**fields, window=choices.pick((1, 16, 40, 256))))

    @classmethod
    def smallest(cls) -> tuple[LayerSpec, ...]:
        """Windows of up to four tokens."""
        return tuple(cls.of(block_size=size, window=window) for size in (1, 2) for window in (1, 2, 3, 4))

    @property
    def kept_beyond(self) -> int:
        return self.spec.extra_retained_tokens

    @property
    def resumes_anywhere(self) -> bool:
        """True if the window is the query's own token."""
        return self.spec.window == 1

    def keeping(self, extra: int) -> LayerSpec:
        """Copy of the layer with so many `extra_retained_tokens`."""
        return dataclasses.replace(self.spec, extra_retained_tokens=extra)

    def as_full(self, block_size: int) -> LayerSpec:
        """Full attention that knows the window."""
        return FullAttention(**self.spec.full_fields(block_size), sliding_window=self.spec.window)

    def max_request_blocks(self, limits: RequestLimits) -> int:
        if self.spec.cp_sharded and limits.context_parallel > 1:
            raise SpecError("cp_sharded", True, f"False for {self.spec.kind} under context parallelism")
        tokens = min(self.spec.retained_tokens + limits.max_in_flight_tokens, limits.max_model_len)
        return -(-tokens // self.spec.block_size) + 1

    def held_blocks(self, start: int, end: int, limits: RequestLimits) -> int:
        skipped = max(0, start - self.spec.retained_tokens)
        return -(-end // self.spec.block_size) - skipped // self.spec.block_size

    def is_uniform_with(self, specs: Sequence[LayerSpec]) -> bool:
        """All of one window. A latent window layer does not object to being compared with a plain one first."""
        return all(isinstance(spec, SlidingWindow) and spec.window == self.spec.window for spec in specs)


class SlidingWindowMlaLayer(SlidingWindowLayer):
    """`hkv.spec.SlidingWindowMLA` under vLLM 0.33."""

    of: ClassVar[Any] = SlidingWindowMLA
    planned_weight: ClassVar[int] = 1
    joins_latent: ClassVar[bool] = False
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

    @classmethod
    def draw_planned(cls, choices: Draw) -> LayerSpec:
        fields = draw_latent({**cls.draw_geometry(choices), "cp_sharded": False}, choices)
        return cls.of(**fields, window=choices.pick((8, 16, 128)))

    def as_full(self, block_size: int) -> LayerSpec:
        """A latent layer that knows the window, aligned anew."""
        fields = self.spec.full_fields(block_size)
        if self.spec.alignment is not None:
            fields["page_size_padded"] = None
        return MLAAttention(
            **fields,
            sliding_window=self.spec.window,
            cache_dtype=self.spec.cache_dtype,
            alignment=self.spec.alignment,
            model_version=self.spec.model_version,
        )

    def is_uniform_with(self, specs: Sequence[LayerSpec]) -> bool:
        """All latent and of one window."""
        return all(isinstance(spec, SlidingWindowMLA) and spec.window == self.spec.window for spec in specs)

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

"""Sliding-window attention: a query reads itself and the `window - 1` tokens before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from hkv.errors import SpecError
from hkv.limits import check_not_negative, check_positive
from hkv.spec.attention import AttentionSpec
from hkv.spec.full_attention import FullAttention
from hkv.spec.layer import Draw, LayerSpec

if TYPE_CHECKING:
    from hkv.spec.limits import RequestLimits


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlidingWindow(AttentionSpec):
    """A sliding-window layer (vLLM 0.33 `SlidingWindowSpec`).

    Attributes:
      window: tokens a query sees, itself included.
      extra_retained_tokens: tokens kept beyond the window for drafts that may be prefilled again; they are kept, not
        read, so `readable` does not count them.
    """

    kind: ClassVar[str] = "sliding_window"
    short_name: ClassVar[str] = "swa"
    vllm_name: ClassVar[str | None] = "SlidingWindowSpec"
    vllm_fields: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"sliding_window": "window", "extra_retained_tokens": "extra_retained_tokens"}
    )
    managed_fields: ClassVar[tuple[str, ...]] = ("window", "extra_retained_tokens")
    parameters: ClassVar[tuple[str, ...]] = ("window",)
    log_fields: ClassVar[tuple[str, ...]] = ("window", "extra_retained_tokens")
    later_log_fields: ClassVar[Mapping[str, int]] = MappingProxyType({"extra_retained_tokens": 3})
    draw_place: ClassVar[int] = 1
    slides: ClassVar[bool] = True
    seeks_run: ClassVar[bool] = True
    retained_sparsely: ClassVar[bool] = True
    event_kind: ClassVar[str | None] = "sliding_window"
    planned_weight: ClassVar[int] = 2

    window: int
    extra_retained_tokens: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "window")
        check_not_negative(self, "extra_retained_tokens")

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
        return cls(block_size=size, window=choices.integer(1, 3 * size + 2))

    @classmethod
    def draw_planned(cls, choices: Draw) -> LayerSpec:
        fields = cls.draw_geometry(choices)
        fields["cp_sharded"] = False
        return cls(**fields, window=choices.pick((1, 16, 40, 256))).draw_padded(choices)

    @classmethod
    def smallest(cls) -> tuple[LayerSpec, ...]:
        """Windows of up to four tokens."""
        return tuple(cls(block_size=size, window=window) for size in (1, 2) for window in (1, 2, 3, 4))

    def to_log(self) -> dict[str, Any]:
        """Without `extra_retained_tokens` where there are none, as logs of every version write it."""
        entry = super().to_log()
        if not self.extra_retained_tokens:
            del entry["extra_retained_tokens"]
        return entry

    def readable(self, n: int) -> range:
        return range(max(0, n - self.window + 1), n)

    @property
    def kept_beyond(self) -> int:
        """`extra_retained_tokens`."""
        return self.extra_retained_tokens

    @property
    def most_read(self) -> int:
        """`window`."""
        return self.window

    @property
    def resumes_anywhere(self) -> bool:
        """True if the window is the query's own token."""
        return self.window == 1

    @property
    def retained_tokens(self) -> int:
        """Tokens below the first one of a step that stay in the cache."""
        return self.window - 1 + self.extra_retained_tokens

    def keeping(self, extra: int) -> Self:
        """Copy of the layer with so many `extra_retained_tokens`."""
        return dataclasses.replace(self, extra_retained_tokens=extra)

    def as_full(self, block_size: int) -> LayerSpec:
        """Full attention that knows the window."""
        return FullAttention(**self.full_fields(block_size), sliding_window=self.window)

    def max_request_blocks(self, limits: RequestLimits) -> int:
        if self.cp_sharded and limits.context_parallel > 1:
            raise SpecError("cp_sharded", True, f"False for {self.kind} under context parallelism")
        tokens = min(self.retained_tokens + limits.max_in_flight_tokens, limits.max_model_len)
        return -(-tokens // self.block_size) + 1

    def held_blocks(self, start: int, end: int, limits: RequestLimits) -> int:
        skipped = max(0, start - self.retained_tokens)
        return -(-end // self.block_size) - skipped // self.block_size

    def is_uniform_with(self, specs: Sequence[LayerSpec]) -> bool:
        """All of one window. A latent window layer does not object to being compared with a plain one first."""
        return all(isinstance(spec, SlidingWindow) and spec.window == self.window for spec in specs)

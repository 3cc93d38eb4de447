"""Sliding-window attention: a query reads itself and the `window - 1` tokens before it."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hkv.spec.attention import AttentionSpec
from hkv.spec.layer import check_not_negative, check_positive


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
    parameter: ClassVar[str | None] = "window"
    log_fields: ClassVar[tuple[str, ...]] = ("window",)

    window: int
    extra_retained_tokens: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "window")
        check_not_negative(self, "extra_retained_tokens")

    def readable(self, n: int) -> range:
        return range(max(0, n - self.window + 1), n)

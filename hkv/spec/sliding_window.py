"""Sliding-window attention: a query reads itself and the `window - 1` tokens before it."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hkv.limits import check_not_negative, check_positive
from hkv.spec.attention import AttentionSpec
from hkv.spec.layer import Written


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlidingWindow(AttentionSpec):
    """A sliding-window layer (vLLM 0.33 `SlidingWindowSpec`).

    Attributes:
      window: tokens a query sees, itself included.
      extra_retained_tokens: tokens kept beyond the window for drafts that may be prefilled again; they are kept, not
        read, so `readable` does not count them.
    """

    kind: ClassVar[str] = "sliding_window"
    written: ClassVar[Written] = Written(
        "swa", ("window",), ("extra_retained_tokens",), seldom=("extra_retained_tokens",)
    )
    slides: ClassVar[bool] = True
    window: int
    extra_retained_tokens: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "window")
        check_not_negative(self, "extra_retained_tokens")

    def readable(self, n: int) -> range:
        return range(max(0, n - self.window + 1), n)

    @property
    def most_read(self) -> int:
        """`window`."""
        return self.window

    @property
    def retained_tokens(self) -> int:
        """Tokens below the first one of a step that stay in the cache."""
        return self.window - 1 + self.extra_retained_tokens

"""Sliding-window attention: a query reads itself and the `window - 1` tokens before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from hkv.errors import SpecError
from hkv.spec.attention import AttentionSpec
from hkv.spec.layer import LayerSpec, check_not_negative, check_positive

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

    @property
    def retained_tokens(self) -> int:
        """Tokens below the first one of a step that stay in the cache."""
        return self.window - 1 + self.extra_retained_tokens

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

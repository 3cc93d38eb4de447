"""Windows: a query reads itself and the `window - 1` tokens before it, of keys and values or of latents.

One kind is never cached, and another reads a request's first tokens as well.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hkv.limits import check_not_negative, check_positive
from hkv.spec.attention import AttentionSpec
from hkv.spec.full_attention import LatentSpec
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


# Latent attention behind a window: one vector a token, of which only the last few are read.


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlidingWindowMLA(LatentSpec, SlidingWindow):
    """A sliding-window layer in the latent format, as in DeepSeek-V4 (vLLM 0.33 `SlidingWindowMLASpec`).

    Managed like a sliding window, hence of the same `kind`; only its bytes differ.

    Attributes:
      cache_dtype: the packing's name as the engine knows it, or None.
      model_version: variant of the packing, e.g. `deepseek_v4`, or None.
    """

    written: ClassVar[Written] = dataclasses.replace(SlidingWindow.written, variant="latent")
    cache_dtype: str | None = None
    model_version: str | None = None


# Latent window that is never cached: after a hit, the window before its end is computed again.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayedWindow(SlidingWindowMLA):
    """A latent sliding-window layer under bounded replay (vLLM 0.33 `SlidingWindowMLASpec.bounded_replay`).

    Its blocks are never shared. A request that resumes behind a hit gets blocks for the window before the hit's end,
    and its scheduler has those tokens computed once more, whose values in other groups stay as they are.
    """

    kind: ClassVar[str] = "replayed_window"
    written: ClassVar[Written] = dataclasses.replace(SlidingWindow.written, short_name="replayed")
    prefix_cacheable: ClassVar[bool] = False
    replays: ClassVar[bool] = True


# Attention sinks plus a window: a query reads the first tokens of a request and the last ones before it.


@dataclasses.dataclass(frozen=True, kw_only=True)
class SinkWindow(AttentionSpec):
    """A layer whose queries read the sinks and a window.

    Attributes:
      sink_len: tokens at a request's beginning that every query reads.
      window: tokens a query sees beside them, itself included.
    """

    kind: ClassVar[str] = "sink_window"
    written: ClassVar[Written] = Written("sink_window", ("sink_len", "window"))
    sink_len: int
    window: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "sink_len", "window")

    def readable(self, n: int) -> range:
        """The window's tokens; `reads` says the sinks' too."""
        return range(max(0, n - self.window + 1), n)

    def reads(self, n: int) -> tuple[range, ...]:
        """The sinks and the window, as one range where nothing lies between."""
        window, sinks = self.readable(n), range(min(n, self.sink_len))
        if window.start <= sinks.stop:
            return (range(n),) if n else ()
        return tuple(found for found in (sinks, window) if found)

    @property
    def sinks(self) -> int:
        """`sink_len`."""
        return self.sink_len

    @property
    def most_read(self) -> int:
        """The sinks and the window."""
        return self.sink_len + self.window

"""Attention sinks plus a window: a query reads the first tokens of a request and the last ones before it.

StreamingLLM's attention, blocks shared by prefix; a kind of HKV's own. vLLM 0.33's `SinkFullAttentionSpec` is another:
its sinks are learned, and belong to no request.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hkv.limits import check_positive
from hkv.spec.attention import AttentionSpec
from hkv.spec.layer import Written


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

"""Attention sinks plus a window: a query reads the first tokens of a request and the last ones before it.

StreamingLLM's attention, blocks shared by prefix; a kind of HKV's own. vLLM 0.33's `SinkFullAttentionSpec` is another:
its sinks are learned, and belong to no request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from hkv.limits import check_positive
from hkv.spec.attention import AttentionSpec
from hkv.spec.layer import Draw, LayerSpec

if TYPE_CHECKING:
    from hkv.spec.limits import RequestLimits


@dataclasses.dataclass(frozen=True, kw_only=True)
class SinkWindow(AttentionSpec):
    """A layer whose queries read the sinks and a window.

    Attributes:
      sink_len: tokens at a request's beginning that every query reads.
      window: tokens a query sees beside them, itself included.
    """

    kind: ClassVar[str] = "sink_window"
    short_name: ClassVar[str] = "sink_window"
    parameters: ClassVar[tuple[str, ...]] = ("sink_len", "window")
    log_fields: ClassVar[tuple[str, ...]] = ("sink_len", "window")
    log_version: ClassVar[int] = 2
    draw_place: ClassVar[int] = 6
    seeks_run: ClassVar[bool] = True
    joins_latent: ClassVar[bool] = False

    sink_len: int
    window: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "sink_len", "window")

    @classmethod
    def draw(cls, choices: Draw, size: int, feature: str, ranks: int) -> dict[str, Any]:
        """Sinks and windows of a few blocks, and of a token less or more."""
        lengths = (1, max(1, size - 1), size, size + 1, 2 * size, 3 * size)
        own = {"sink_len": choices.pick(lengths), "window": choices.pick((*lengths, 6 * size))}
        return {**super().draw(choices, size, feature, ranks), **own}

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

    def max_request_blocks(self, limits: RequestLimits) -> int:
        tokens = min(self.window - 1 + limits.max_in_flight_tokens, limits.max_model_len)
        return min(-(-self.sink_len // self.block_size) - (-tokens // self.block_size) + 1, self.row_blocks(limits))

    def held_blocks(self, start: int, end: int, limits: RequestLimits) -> int:
        return -(-end // self.block_size) - len(self.retired(start, self.block_size))

    def is_uniform_with(self, specs: Sequence[LayerSpec]) -> bool:
        """All of as many sinks and one window."""
        own = (self.sink_len, self.window)
        return all(isinstance(spec, SinkWindow) and (spec.sink_len, spec.window) == own for spec in specs)

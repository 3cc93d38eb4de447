"""Attention sinks plus a window, under the rules of vLLM 0.33 (which has no such kind): sinks, and the window's run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.kinds._attention import AttentionLayer
from hkv.spec import LayerSpec, RequestLimits
from hkv.spec.layer import Draw
from hkv.spec.sliding_window import SinkWindow


def parameters(config: VllmConfig, group: int, spec: SinkWindow, eagle: bool) -> dict[str, Any]:
    """The window's lookback, the blocks it needs, and the most that admission counts, the sinks' among them."""
    del group, eagle
    block, lookback = spec.block_size, spec.window - 1
    in_flight = min(lookback + config.in_flight_limit, config.max_model_len)
    sinks, need = -(-spec.sink_len // block), -(-lookback // block)
    return {"LOOKBACK": lookback, "NEED": need or -1, "CAP": sinks - (-in_flight // block) + 1}


class SinkWindowLayer(AttentionLayer):
    """`hkv.spec.SinkWindow` under vLLM 0.33."""

    of: ClassVar[Any] = SinkWindow
    log_version: ClassVar[int] = 2
    draw_place: ClassVar[int] = 6
    seeks_run: ClassVar[bool] = True
    joins_latent: ClassVar[bool] = False

    @classmethod
    def draw(cls, choices: Draw, size: int, feature: str, ranks: int) -> dict[str, Any]:
        """Sinks and windows of a few blocks, and of a token less or more."""
        lengths = (1, max(1, size - 1), size, size + 1, 2 * size, 3 * size)
        own = {"sink_len": choices.pick(lengths), "window": choices.pick((*lengths, 6 * size))}
        return {**super().draw(choices, size, feature, ranks), **own}

    def max_request_blocks(self, limits: RequestLimits) -> int:
        tokens = min(self.spec.window - 1 + limits.max_in_flight_tokens, limits.max_model_len)
        return min(
            -(-self.spec.sink_len // self.spec.block_size) - (-tokens // self.spec.block_size) + 1,
            self.row_blocks(limits),
        )

    def held_blocks(self, start: int, end: int, limits: RequestLimits) -> int:
        return -(-end // self.spec.block_size) - len(self.retired(start, self.spec.block_size))

    def is_uniform_with(self, specs: Sequence[LayerSpec]) -> bool:
        """All of as many sinks and one window."""
        own = (self.spec.sink_len, self.spec.window)
        return all(isinstance(spec, SinkWindow) and (spec.sink_len, spec.window) == own for spec in specs)

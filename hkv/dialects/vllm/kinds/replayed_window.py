"""Latent windows under bounded replay (vLLM 0.33 `SlidingWindowManager`): retired as windows are, and never hit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from hkv.dialects.vllm.kinds.sliding_window import SlidingWindowMlaLayer, parameters
from hkv.spec import LayerSpec
from hkv.spec.sliding_window import ReplayedWindow

__all__ = ["parameters"]


class ReplayedWindowLayer(SlidingWindowMlaLayer):
    """`hkv.spec.ReplayedWindow` under vLLM 0.33."""

    of: ClassVar[Any] = ReplayedWindow
    replays: ClassVar[bool] = True
    log_version: ClassVar[int] = 3
    vllm_fields: ClassVar[Mapping[str, str]] = MappingProxyType(
        {**SlidingWindowMlaLayer.vllm_fields, "bounded_replay": "replays"}
    )
    managed_fields: ClassVar[tuple[str, ...]] = ("window", "extra_retained_tokens", "replays")
    planned_weight: ClassVar[int] = 0

    @classmethod
    def draw_weight(cls, feature: str, version: int) -> int:
        return 0

    @classmethod
    def compared_weight(cls, aligned: bool) -> int:
        return 0

    @classmethod
    def smallest(cls) -> tuple[LayerSpec, ...]:
        """None: no hit depends on it."""
        return ()

    def is_uniform_with(self, specs: Sequence[LayerSpec]) -> bool:
        """All replayed and of one window."""
        return all(isinstance(spec, ReplayedWindow) and spec.window == self.spec.window for spec in specs)

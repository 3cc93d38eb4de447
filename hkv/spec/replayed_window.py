"""Latent window that is never cached: after a hit, the window before its end is computed again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

from hkv.spec.layer import LayerSpec
from hkv.spec.sliding_window_mla import SlidingWindowMLA


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayedWindow(SlidingWindowMLA):
    """A latent sliding-window layer under bounded replay (vLLM 0.33 `SlidingWindowMLASpec.bounded_replay`).

    Its blocks are never shared. A request that resumes behind a hit gets blocks for the window before the hit's end,
    and its scheduler has those tokens computed once more, whose values in other groups stay as they are.
    """

    kind: ClassVar[str] = "replayed_window"
    short_name: ClassVar[str] = "replayed"
    log_version: ClassVar[int] = 3
    log_variant: ClassVar[str] = ""
    prefix_cacheable: ClassVar[bool] = False
    replays: ClassVar[bool] = True
    vllm_fields: ClassVar[Mapping[str, str]] = MappingProxyType(
        {**SlidingWindowMLA.vllm_fields, "bounded_replay": "replays"}
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
        return all(isinstance(spec, ReplayedWindow) and spec.window == self.window for spec in specs)

"""Opaque regions under vLLM 0.33 (`CircularBufferManager`): one block a request, for the whole of its life."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.kinds._layer import VllmLayer
from hkv.spec import LayerSpec, OpaqueState, RequestLimits
from hkv.spec.layer import Draw


def parameters(config: VllmConfig, group: int, spec: LayerSpec, eagle: bool) -> dict[str, Any]:
    """No field: one block whatever the configuration."""
    del config, group, spec, eagle
    return {}


class OpaqueLayer(VllmLayer):
    """`hkv.spec.OpaqueState` under vLLM 0.33."""

    of: ClassVar[Any] = OpaqueState
    vllm_name: ClassVar[str | None] = "CircularBufferSpec"
    vllm_fields: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"head_size": "entry_bytes", "page_size_padded": "page_size_padded"}
    )
    log_version: ClassVar[int] = 2
    planned_weight: ClassVar[int] = 1
    table_alignment_tokens: ClassVar[int | None] = None

    @classmethod
    def compared_weight(cls, aligned: bool) -> int:
        return 0 if aligned else 1

    @classmethod
    def draw_compared(cls, choices: Draw, size: int, ranks: int) -> LayerSpec:
        return cls.of(block_size=size)

    @classmethod
    def draw_planned(cls, choices: Draw) -> LayerSpec:
        return cls.of(block_size=choices.pick((4, 8)), entry_bytes=choices.pick((16, 64, 100)))

    @property
    def element(self) -> tuple[str, str] | None:
        """Bytes."""
        return "uint8", "none"

    def row_blocks(self, limits: RequestLimits) -> int:
        """One column: the ring."""
        return 1

    def max_request_blocks(self, limits: RequestLimits) -> int:
        return 1

    def held_blocks(self, start: int, end: int, limits: RequestLimits) -> int:
        return 1

"""Opaque regions under vLLM 0.33 (`CircularBufferManager`): one block a request, for the whole of its life."""

from __future__ import annotations

from typing import Any

from hkv.dialects.vllm.config import VllmConfig
from hkv.spec import LayerSpec


def parameters(config: VllmConfig, group: int, spec: LayerSpec, eagle: bool) -> dict[str, Any]:
    """No field: one block whatever the configuration."""
    del config, group, spec, eagle
    return {}

"""Cross attention under vLLM 0.33 (`CrossAttentionManager`): blocks of an encoder's output, none of the request's."""

from __future__ import annotations

from typing import Any

from hkv.dialects.vllm.config import VllmConfig
from hkv.spec import CrossAttention


def parameters(config: VllmConfig, group: int, spec: CrossAttention, eagle: bool) -> dict[str, Any]:
    """No field beside those that follow from the spec: the encoder's tokens come with each operation."""
    del config, group, spec, eagle
    return {}

"""Chunked local attention under vLLM 0.33 (`ChunkedLocalAttentionManager`): only the current chunk is looked up."""

from __future__ import annotations

from typing import Any

from hkv.dialects.vllm.config import VllmConfig
from hkv.errors import ConfigError
from hkv.spec import ChunkedLocal


def parameters(config: VllmConfig, group: int, spec: ChunkedLocal, eagle: bool) -> dict[str, Any]:
    """The chunk, and the most that admission counts.

    Raises:
      ConfigError: hits that end where the kind cannot resume.
    """
    if eagle:
        raise ConfigError(f"groups[{group}].eagle", True, f"no EAGLE drop for {spec.kind}")
    alone = len(config.topology.specs) == 1
    if config.caching and not alone and config.block_size(group) != config.hit_alignment:
        expected = f"the {config.hit_alignment} tokens to which hits are aligned"
        raise ConfigError(f"groups[{group}].block_size", config.block_size(group), expected)
    in_flight = min(spec.chunk + config.in_flight_limit, config.max_model_len)
    return {"UNIT": spec.chunk, "REACH": 0, "CAP": -(-in_flight // spec.block_size)}

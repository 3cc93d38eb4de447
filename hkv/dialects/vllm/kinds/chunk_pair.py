"""Own and previous chunk under the rules of vLLM 0.33, which lacks it: a run from the previous chunk on."""

from __future__ import annotations

from typing import Any

from hkv.dialects.vllm.config import VllmConfig
from hkv.spec.chunk_pair import ChunkPair


def parameters(config: VllmConfig, group: int, spec: ChunkPair, eagle: bool) -> dict[str, Any]:
    """A chunk before the own one, and the most that admission counts."""
    del group, eagle
    in_flight = min(2 * spec.chunk + config.in_flight_limit, config.max_model_len)
    blocks = spec.chunk // spec.block_size
    return {"UNIT": spec.chunk, "REACH": spec.chunk, "NEED": blocks, "CAP": -(-in_flight // spec.block_size)}

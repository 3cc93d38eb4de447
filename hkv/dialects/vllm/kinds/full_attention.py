"""Full attention under vLLM 0.33 (`FullAttentionManager`): every block counts, from the first on."""

from __future__ import annotations

from typing import Any

from hkv.dialects.vllm.config import VllmConfig


def parameters(config: VllmConfig, group: int, eagle: bool) -> dict[str, Any]:
    """Where a manager block holds several hash blocks, the prompt's tail is registered, and hits may end inside.

    Such a hit waits for the next step if its block is not written so far (`hkv.bugs`: copied-before-written).
    """
    del eagle
    coarse = config.caching and config.block_size(group) != config.hash_block_size
    fine = coarse and config.partial_hits
    return {"TAIL": coarse, "FINE": fine, "WAITS": fine and "copied-before-written" not in config.bugs}

"""Full attention under vLLM 0.33 (`FullAttentionManager`): every block counts, from the first on."""

from __future__ import annotations

from typing import Any

from hkv.dialects.vllm.config import VllmConfig
from hkv.spec import LayerSpec


def parameters(config: VllmConfig, group: int, spec: LayerSpec, eagle: bool) -> dict[str, Any]:
    """Registration of the prompt's tail, where a manager block is several hash blocks; hits may then end inside one.

    Such a hit waits for the next step if its block is not written yet (`hkv.bugs`: copied-before-written).
    """
    del spec, eagle
    coarse = config.caching and config.block_size(group) != config.hash_block_size
    fine = coarse and config.partial_hits
    return {"TAIL": coarse, "FINE": fine, "WAITS": fine and "copied-before-written" not in config.bugs}

"""Small spaces for the explorer, of one shape, so that tests share its programs."""

from __future__ import annotations

from typing import Any

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.explorer import Space
from hkv.model.topology import Topology
from hkv.spec import FullAttention, LayerSpec, SlidingWindow

CHUNK = 512
GROUPS = (FullAttention(block_size=1), SlidingWindow(block_size=1, window=2))


def space(*specs: LayerSpec, num_blocks: int = 5, length: int = 2, prompt: int = 1, **changes: Any) -> Space:
    """A small space without the operations that make it large."""
    specs = specs or GROUPS
    sizes = [spec.block_size for spec in specs]
    without = frozenset(changes.pop("without", ("evict", "reset", "delay")))
    config = VllmConfig(
        topology=Topology.of_specs(specs),
        num_blocks=num_blocks,
        hash_block_size=min(sizes),
        scheduler_block_size=max(sizes),
        max_model_len=length,
        **changes,
    )
    return Space(config=config, prompt=prompt, without=without)

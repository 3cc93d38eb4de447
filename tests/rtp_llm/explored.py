"""Spaces under RTP-LLM's rules that are explored in seconds."""

from __future__ import annotations

import dataclasses

from hkv.contract.explore_command import Space
from hkv.dialects.rtp_llm.explorer import RtpWorld
from hkv.dialects.rtp_llm.schedule.run import rtp_cache
from hkv.oracle.exploration import BreadthFirst
from hkv.spec import FullAttention, LayerSpec, Mamba, SlidingWindow

FULL = FullAttention(block_size=1, num_kv_heads=1, head_size=1, dtype="bfloat16")
WINDOW = SlidingWindow(block_size=1, num_kv_heads=1, head_size=1, dtype="bfloat16", window=2)
SPACES: dict[str, tuple[str, list[LayerSpec], int]] = {
    "single": ("rtp-llm/single", [FULL], 3),
    "hybrid": ("rtp-llm/hybrid", [FULL, WINDOW], 5),
    "hybrid with states": ("rtp-llm/hybrid", [FULL, Mamba(block_size=1)], 5),
    "blocks of two": ("rtp-llm/hybrid", [dataclasses.replace(FULL, block_size=2), Mamba(block_size=2)], 5),
    "hybrid-pool": ("rtp-llm/hybrid-pool", [FULL, WINDOW], 3),
}


def world(name: str, *, tree: bool = False, num_blocks: int = 0) -> RtpWorld:
    """The empty cache of that name; a single request of up to two tokens, blocks of one."""
    dialect, specs, count = SPACES[name]
    config = rtp_cache(dialect, specs, (num_blocks or count,), prefix_tree=tree)
    return RtpWorld(config, Space(requests=1, prompt=2, max_model_len=2))


def explored(name: str, *, tree: bool = False, limit_states: int | None = None) -> BreadthFirst:
    """The search from there, to its end."""
    small = world(name, tree=tree)
    search = BreadthFirst(small.header, small, limit_states=limit_states)
    search.run()
    return search

"""Windows and chunks of attention as SWA groups: blocks that have to stay at the end of a sequence."""

from __future__ import annotations

from hkv.spec import LayerSpec


def tail_blocks(window: LayerSpec) -> int:
    """Blocks at the end of a list that the next query reads at most; 2, RTP-LLM's default, where it reads fewer.

    A window begins anywhere; a chunk at a block, unless its size is no multiple of a block's.
    """
    size = window.block_size
    if window.slides or window.most_read % size:
        return max(2, 1 + -(-(window.most_read - 2) // size))
    return max(2, window.most_read // size)

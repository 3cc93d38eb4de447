"""Keys, values and states in pages of any layout: moved in and out, and attended to. Pure functions over one buffer."""

from hkv.paged.operations import copy_blocks, gather, implementations_of, scatter, write, zero_blocks
from hkv.paged.ragged_attention import attention
from hkv.paged.step import quantize_per_tensor, quantize_per_token_head, write_step

__all__ = [
    "attention",
    "copy_blocks",
    "gather",
    "implementations_of",
    "quantize_per_tensor",
    "quantize_per_token_head",
    "scatter",
    "write",
    "write_step",
    "zero_blocks",
]

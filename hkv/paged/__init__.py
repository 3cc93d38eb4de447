"""Moving keys, values and states into pages of any layout and out again: pure functions over one flat buffer."""

from hkv.paged.operations import copy_blocks, gather, implementations_of, scatter, write, zero_blocks
from hkv.paged.quantization import quantize_per_tensor, quantize_per_token_head
from hkv.paged.step import write_step

__all__ = [
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

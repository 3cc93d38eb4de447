"""A writer of new keys and values in torch: `hkv check-kernel examples/kernels/torch_writer.py:write`."""

# pyright: reportMissingImports=false

from __future__ import annotations

import torch

from hkv.testing.kernels import kernel


@kernel("write")
def write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Writes each token's key and value to its slot; caches are `[blocks, slots, heads, elements]`."""
    kept = slot_mapping >= 0
    blocks, slots = slot_mapping[kept] // key_cache.shape[1], slot_mapping[kept] % key_cache.shape[1]
    key_cache[blocks, slots], value_cache[blocks, slots] = key[kept], value[kept]

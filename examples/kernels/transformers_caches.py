"""transformers' caches under test: the static layer, and the paged cache of continuous batching.

hkv check-kernel examples/kernels/transformers_caches.py:static_layer
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import types

import torch

from hkv.testing.kernels import kernel

FLOATS = ("bfloat16", "float16", "float32")


@kernel("write", axes="HSD", dtypes=FLOATS, lacks=("tensor scales",))
def static_layer(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`StaticLayer.update`, one token after the other: it writes where its length says, so each slot is its length."""
    from transformers.cache_utils import StaticLayer

    layer = StaticLayer(max_cache_len=key_cache.shape[1])
    layer.device, layer.is_initialized = key.device, True
    layer.keys, layer.values = key_cache[None], value_cache[None]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            layer.cumulative_length = torch.tensor(slot)
            layer.update(key[None, token, :, None], value[None, token, :, None])


@kernel("write", axes="SHD", dtypes=FLOATS, lacks=("padding tokens", "tensor scales"))
def paged_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`FullAttentionCacheAllocator.update` of a step that reads nothing; padding goes to a slot of its own there."""
    _update(key, value, key_cache, value_cache, torch.zeros(0, dtype=torch.int64), slot_mapping)


@kernel("gather", axes="SHD", dtypes=FLOATS, lacks=("padding tokens", "null block"))
def paged_cache_read(
    key_cache: torch.Tensor, value_cache: torch.Tensor, kernel_block_table: torch.Tensor, kernel_block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same method's read-back, of a step that writes nothing."""
    slots = kernel_block_table.long()[:, None] * kernel_block_size + torch.arange(kernel_block_size)
    none = key_cache[:0], value_cache[:0]
    return _update(*none, key_cache, value_cache, slots.flatten(), torch.zeros(0, dtype=torch.int64))


def _update(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    from transformers.generation.continuous_batching.cache_allocators.full_attention import FullAttentionCacheAllocator

    own = types.SimpleNamespace(_kv_token_views={0: (key_cache, value_cache)})
    return FullAttentionCacheAllocator.update(own, key, value, 0, read, write)

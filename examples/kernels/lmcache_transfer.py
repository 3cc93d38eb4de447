"""LMCache 0.5.6's transfer of blocks in plain torch under test, which it uses where no GPU is.

    hkv check-kernel examples/kernels/lmcache_transfer.py:pack
    hkv check-kernel examples/kernels/lmcache_transfer.py:unpack

Tensors and objects are given by pointer, as its servers do.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import torch
from lmcache.lmcache_native import EngineKVFormat, PageBufferShapeDesc, TransferDirection
from lmcache.v1.platform.torch_ops.mp_mem_kernels import multi_layer_block_kv_transfer

from hkv.testing.kernels import kernel

SUPPORTS: dict[str, Any] = {"dtypes": ("bfloat16", "float32"), "lacks": ("padded pages", "padding tokens")}


@kernel("pack", **SUPPORTS)
def pack(tensors: list[Any], objects: Any, block_ids: Any, skip: int, geometry: Any, region: Any) -> None:
    """`multi_layer_block_kv_transfer` from pages to objects."""
    _transfer(tensors, objects, block_ids, skip, geometry, region, TransferDirection.D2H)


@kernel("unpack", **SUPPORTS)
def unpack(tensors: list[Any], objects: Any, block_ids: Any, skip: int, geometry: Any, region: Any) -> None:
    """The same from objects to pages."""
    _transfer(tensors, objects, block_ids, skip, geometry, region, TransferDirection.H2D)


def _transfer(
    tensors: list[Any], objects: Any, block_ids: Any, skip: int, geometry: Any, region: Any, direction: Any
) -> None:
    desc = PageBufferShapeDesc()
    desc.kv_size, desc.nl, desc.nb, desc.bs = geometry.kv_size, geometry.num_layers, geometry.num_blocks, geometry.slots
    desc.nh, desc.hs, desc.element_size = geometry.num_heads, geometry.head_size, geometry.item_bytes
    multi_layer_block_kv_transfer(
        torch.tensor([tensor.data_ptr() for tensor in tensors]),
        [row.data_ptr() + region.offset for row in objects],
        block_ids, "cpu", direction, desc, region.slots, EngineKVFormat(int(geometry.format)), skip,
    )  # fmt: skip

"""LMCache 0.5.6's view of a hybrid cache: formats, kernel groups, object groups, chunk objects, plans and lookup.

Sizes in tokens, slots, blocks and bytes meet here; every name says which it means: a *block id* is the engine's, a
*slot* is one physical row of a page, a *chunk* is the tokens of one chunk object. All but `transfer` is host-only
(`docs/layouts.md`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hkv._lazy import loader

if TYPE_CHECKING:
    from hkv.chunks.detection import Hints, TensorView, discover_per_layer_formats
    from hkv.chunks.formats import BUGS, EngineKVFormat
    from hkv.chunks.kernel_groups import EngineGroupInfo, KernelGroup, group_layers
    from hkv.chunks.objects import object_groups, object_layout, status_report
    from hkv.chunks.plans import ChunkRow, longest_prefix, null_chunks, plan_transfer, retrieve_range, store_range
    from hkv.chunks.transfer import Transfer, pack, pack_groups, unpack, unpack_groups

__all__ = [
    "BUGS",
    "ChunkRow",
    "EngineGroupInfo",
    "EngineKVFormat",
    "Hints",
    "KernelGroup",
    "TensorView",
    "Transfer",
    "discover_per_layer_formats",
    "group_layers",
    "longest_prefix",
    "null_chunks",
    "object_groups",
    "object_layout",
    "pack",
    "pack_groups",
    "plan_transfer",
    "retrieve_range",
    "status_report",
    "store_range",
    "unpack",
    "unpack_groups",
]

__getattr__ = loader(
    __name__,
    {
        "hkv.chunks.detection": "Hints TensorView discover_per_layer_formats",
        "hkv.chunks.formats": "BUGS EngineKVFormat",
        "hkv.chunks.kernel_groups": "EngineGroupInfo KernelGroup group_layers",
        "hkv.chunks.objects": "object_groups object_layout status_report",
        "hkv.chunks.plans": "ChunkRow longest_prefix null_chunks plan_transfer retrieve_range store_range",
        "hkv.chunks.transfer": "Transfer pack pack_groups unpack unpack_groups",
    },
    {"Row": ("ChunkRow", "0.2.0")},
)

"""Status report of a cache that LMCache serves: sizes of its kernel groups, as its status endpoint tells them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hkv.chunks.formats import TRAITS
from hkv.chunks.kernel_groups import KernelGroup
from hkv.chunks.objects import ObjectGroup


def hidden_dim_sizes(groups: Sequence[KernelGroup]) -> list[int]:
    """Elements of a slot, one number a kernel group (LMCache 0.5.6 `hidden_dim_sizes`, once `hidden_dim_size`)."""
    return [group.geometry.num_heads * group.geometry.head_size for group in groups]


def bytes_per_token(groups: Sequence[KernelGroup]) -> int:
    """Bytes of a logical token over all groups, each rounded down (LMCache 0.5.6 `cache_size_per_token`)."""
    total = 0
    for group in groups:
        geometry = group.geometry
        slot = geometry.kv_size * len(group.layer_indices) * geometry.row_bytes
        total += slot // (group.tokens_per_block // geometry.slots)
    return total


def status_report(groups: Sequence[KernelGroup], objects: Sequence[ObjectGroup], num_layers: int) -> dict[str, Any]:
    """The report (LMCache 0.5.6 `BaseCacheContext.report_status`), without the texts that describe formats.

    `num_layers` are the model's; those of all groups together are fewer where some share a cache.
    """
    of_group = {member: index for index, entry in enumerate(objects) for member in entry.members}
    return {
        "num_layers": num_layers,
        "num_blocks": groups[0].geometry.num_blocks if groups else 0,
        "cache_size_per_token": bytes_per_token(groups),
        "kernel_groups": [
            {
                "kernel_group_idx": index,
                "engine_group_idx": group.info.engine_group_id,
                "object_group_idx": of_group.get(index, 0),
                "num_layers": len(group.layer_indices),
                "layer_indices": list(group.layer_indices),
                "tokens_per_block": group.tokens_per_block,
                "slots_per_block": group.geometry.slots,
                "dtype": f"torch.{group.geometry.dtype}",
                "is_mla": TRAITS[group.geometry.format].mla,
                "engine_kv_format": group.geometry.format.name,
            }
            for index, group in enumerate(groups)
        ],
    }

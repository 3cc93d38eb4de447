"""Vectors of chunk objects, as LMCache 0.5.6 lays them out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from hkv.chunks.formats import TRAITS, EngineKVFormat
from hkv.chunks.kernel_groups import EngineGroupInfo, KernelGroup, PageGeometry
from hkv.chunks.objects import StagingLayout, object_groups, object_layout


def _group(
    format: int, first: int, slots: int, heads: int, size: int, dtype: str, layers: int, **info: Any
) -> KernelGroup:
    kind = EngineKVFormat(format)
    geometry = PageGeometry(kind, TRAITS[kind].kv_size, layers, 100, slots, heads, size, dtype)
    indices = tuple(range(first, first + layers))
    return KernelGroup(indices, geometry, EngineGroupInfo(info.pop("engine_group", 0), indices, **info))


MODELS = {
    "one attention group": (_group(1, 0, 16, 8, 64, "bfloat16", 4),),
    "attention and windows": (
        _group(1, 0, 16, 8, 64, "bfloat16", 2),
        _group(1, 2, 16, 4, 64, "bfloat16", 6, engine_group=1, window=128),
        _group(1, 8, 32, 4, 64, "float16", 3, engine_group=2, window=640),
    ),
    "latent": (_group(3, 0, 64, 1, 576, "bfloat16", 5),),
    "attention and recurrent": (
        _group(1, 0, 16, 2, 128, "bfloat16", 2),
        _group(1, 2, 16, 1, 512, "float32", 6, engine_group=1, window=16, recurrent=True),
    ),
}
"""Kernel groups of small models."""


def cases() -> Iterator[dict[str, Any]]:
    """Every model, in one object or several, windows kept or whole."""
    for (name, groups), chunk, separate, full in itertools.product(
        MODELS.items(), (64, 256), (False, True), (False, True)
    ):
        objects = object_groups(groups, chunk, separate, full)
        layouts = tuple(object_layout(groups, found, chunk, full) for found in objects)
        staging = StagingLayout(layouts)
        yield {
            "name": f"{name}, chunks of {chunk}, {'separate' if separate else 'together'}{', whole windows' * full}",
            "input": {
                "groups": [_record(group) for group in groups],
                "chunk_tokens": chunk,
                "separate": separate,
                "full_window": full,
            },
            "expected": {
                "objects": [
                    {
                        "members": list(found.members),
                        "window_chunks": found.window,
                        "kind": found.kind,
                        "bytes": layout.nbytes,
                        "regions": [
                            {**dataclasses.asdict(region), "shape": list(region.shape)} for region in layout.regions
                        ],
                    }
                    for found, layout in zip(objects, layouts, strict=True)
                ],
                "staging_slot_bytes": staging.slot_bytes,
                "staging_bytes": staging.nbytes,
            },
        }


def _record(group: KernelGroup) -> dict[str, Any]:
    geometry, info = group.geometry, group.info
    return {
        "format": geometry.format.name,
        "planes": geometry.kv_size,
        "layers": list(info.layer_indices),
        "slots": geometry.slots,
        "heads": geometry.num_heads,
        "head_size": geometry.head_size,
        "dtype": geometry.dtype,
        "engine_group": info.engine_group_id,
        "window": info.window,
        "recurrent": info.recurrent,
    }

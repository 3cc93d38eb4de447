"""Kernel groups of one geometry, as LMCache 0.5.6 finds them in an engine."""

from __future__ import annotations

from hkv.chunks.formats import TRAITS, EngineKVFormat
from hkv.chunks.kernel_groups import (
    EngineGroupInfo,
    KernelGroup,
    PageGeometry,
)
from hkv.chunks.objects import ObjectGroup, object_groups

F = EngineKVFormat


def group(fmt=1, slots=16, heads=8, size=64, dtype="bfloat16", layers=1, blocks=100, **info) -> KernelGroup:
    traits = TRAITS[F(fmt)]
    geometry = PageGeometry(F(fmt), traits.kv_size, layers, blocks, slots, heads, size, dtype)
    info.setdefault("layer_indices", tuple(range(layers)))
    return KernelGroup(tuple(range(layers)), geometry, EngineGroupInfo(0, **info))


def mla(dtype="bfloat16", size=576, slots=64, layers=1, **info) -> KernelGroup:
    return group(14 if (dtype, size) == ("uint8", 132) else 3, slots, 1, size, dtype, layers, **info)


def whole(groups) -> ObjectGroup:
    return object_groups(groups, 256)[0]

"""Chunk objects: which kernel groups lie in one, and where (LMCache 0.5.6 object groups and memory objects)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hkv.chunks.formats import TRAITS
from hkv.chunks.kernel_groups import KernelGroup
from hkv.errors import LayoutError

FULL_WINDOW = -1


@dataclasses.dataclass(frozen=True)
class ObjectGroup:
    """Kernel groups, by index in the order of their regions, whose data lie in one object.

    `window` is the number of chunks at the end of a prefix that must be present, or -1 for all; `kind` is `attention`,
    `recurrent` or `aux`.
    """

    members: tuple[int, ...]
    window: int
    kind: str


def object_groups(
    groups: Sequence[KernelGroup], chunk: int, separate: bool = False, full_window: bool = False
) -> tuple[ObjectGroup, ...]:
    """The object groups of a cache whose chunks have `chunk` tokens.

    Together, everything is in one object, which counts as attention whatever is in it; `separate` makes one object per
    window, recurrent flag and auxiliary tag. `full_window` keeps whole chunks of windowed groups; recurrent ones keep
    their window.
    """
    if not groups:
        return ()
    if not separate:
        return (ObjectGroup(tuple(range(len(groups))), FULL_WINDOW, "attention"),)
    buckets: dict[Any, list[int]] = {}
    for index, group in enumerate(groups):
        window = FULL_WINDOW if group.info.window == -1 else -(-group.info.window // chunk)
        buckets.setdefault((group.info.extra_tag, group.info.recurrent, window), []).append(index)
    ordered = sorted(buckets.items(), key=lambda item: (item[0][0] != 0, item[1][0]))
    result = []
    for (_, recurrent, window), members in ordered:
        kept = window if window >= 1 and (recurrent or not full_window) else FULL_WINDOW
        result.append(ObjectGroup(tuple(members), kept, _kind([groups[member] for member in members])))
    return tuple(result)


def _kind(groups: Sequence[KernelGroup]) -> str:
    if any(group.info.extra_tag for group in groups):
        return "aux"
    return "recurrent" if all(group.info.recurrent for group in groups) else "attention"


@dataclasses.dataclass(frozen=True)
class Region:
    """A kernel group's part of an object: row-major `[planes, layers, slots, row]`, tokens before heads.

    `offset` is in bytes, of no promised alignment; `shape` is `(planes, layers, slots, heads * head size)` in elements.
    """

    group: int
    offset: int
    slots: int
    shape: tuple[int, int, int, int]
    dtype: str
    nbytes: int


@dataclasses.dataclass(frozen=True)
class ObjectLayout:
    """Layout of one object: its regions one after the other, in member order, without padding."""

    regions: tuple[Region, ...]
    nbytes: int

    def region(self, group: int) -> Region:
        """The region of a kernel group; LayoutError where it has none."""
        for region in self.regions:
            if region.group == group:
                return region
        raise LayoutError("group", group, f"a member of the object: {[region.group for region in self.regions]}")


def object_layout(
    groups: Sequence[KernelGroup],
    object_group: ObjectGroup,
    chunk: int,
    full_window: bool = False,
    bugs: frozenset[str] = frozenset(),
) -> ObjectLayout:
    """The layout of one object group's objects.

    A group whose window is shorter than the chunk contributes only that, unless `full_window`; a recurrent one does so
    only under bug `lmcache-full-window`.
    """
    regions: list[Region] = []
    offset = 0
    for member in object_group.members:
        group = groups[member]
        group.check_chunk(chunk)
        widened = full_window and (not group.info.recurrent or "lmcache-full-window" in bugs)
        geometry = group.geometry
        slots = group.num_slots(group.kept_tokens(chunk, widened))
        shape = (geometry.kv_size, geometry.num_layers, slots, geometry.num_heads * geometry.head_size)
        nbytes = geometry.kv_size * geometry.num_layers * slots * geometry.row_bytes
        regions.append(Region(member, offset, slots, shape, geometry.dtype, nbytes))
        offset += nbytes
    return ObjectLayout(tuple(regions), offset)


@dataclasses.dataclass(frozen=True)
class StagingLayout:
    """A staging buffer of several slots, each with one object of every object group, one after the other.

    A transfer moves at most as many objects at once as there are slots.
    """

    objects: tuple[ObjectLayout, ...]
    num_slots: int = 4

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return sum(layout.nbytes for layout in self.objects)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.num_slots * self.slot_bytes

    def offset(self, slot: int, object_group: int, group: int | None = None) -> int:
        """Bytes to an object in a slot, or to a kernel group's region in it."""
        if not 0 <= slot < self.num_slots:
            raise LayoutError("slot", slot, f"below {self.num_slots}")
        if not 0 <= object_group < len(self.objects):
            raise LayoutError("object_group", object_group, f"below {len(self.objects)}")
        base = slot * self.slot_bytes + sum(layout.nbytes for layout in self.objects[:object_group])
        return base if group is None else base + self.objects[object_group].region(group).offset


# The status report of a cache that LMCache serves, as its status endpoint tells it.


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

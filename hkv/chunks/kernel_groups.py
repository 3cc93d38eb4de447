"""Kernel groups: the layers that one transfer launch serves, in LMCache 0.5.6's order, with their page geometry."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hkv.chunks.detection import Nested, TensorView, plane_row_elements
from hkv.chunks.formats import TRAITS, EngineKVFormat, PageOrder, Structure
from hkv.errors import LayoutError
from hkv.spec.dtypes import item_bytes

EXCLUDED = -1
"""Engine group of layers that take no part."""


@dataclasses.dataclass(frozen=True)
class EngineGroupInfo:
    """Facts that an engine reports about one kernel group (LMCache 0.5.6 `EngineGroupInfo`).

    Layers are ascending; one block id stands for `tokens_per_block` logical tokens, 0 for as many as a page has slots;
    `window` is in tokens, -1 for everything; `extra_tag` is that of an auxiliary pool, or 0.
    """

    engine_group_id: int
    layer_indices: tuple[int, ...] = ()
    tokens_per_block: int = 0
    window: int = -1
    extra_tag: int = 0
    recurrent: bool = False


@dataclasses.dataclass(frozen=True)
class PageGeometry:
    """The pages of one kernel group (LMCache 0.5.6 `PageBufferShapeDesc`). Counts are elements unless they say bytes.

    `num_blocks` are those of one layer's tensor, `slots` and `num_heads` (1 for latent formats) those of a page. A head
    has K and V together where the format fuses them. `block_stride` is from one page of a tensor to the next, 0 when
    pages are tight.
    """

    format: EngineKVFormat
    kv_size: int
    num_layers: int
    num_blocks: int
    slots: int
    num_heads: int
    head_size: int
    dtype: str
    block_stride: int = 0

    @property
    def item_bytes(self) -> int:
        """Bytes per element."""
        return item_bytes(self.dtype)

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one slot: what a transfer moves in one piece."""
        return self.head_size * self.item_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one slot."""
        return self.num_heads * self.head_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page that carry data."""
        return self.slots * self.row_bytes

    @property
    def page_stride_bytes(self) -> int:
        """Bytes from one page of a tensor to the next."""
        return self.block_stride * self.item_bytes if self.block_stride else self.page_bytes

    @property
    def pages_per_tensor(self) -> int:
        """Pages in each of the group's tensors."""
        traits = TRAITS[self.format]
        planes = self.kv_size if traits.page_order is not PageOrder.BLOCK else 1
        layers = self.num_layers if traits.structure is Structure.CROSS_LAYER else 1
        return self.num_blocks * planes * layers

    @property
    def vector_bytes(self) -> int:
        """Bytes that LMCache's kernel moves at once: 16, 4 or 2, by the bytes of a head; LayoutError for none."""
        size = self.head_bytes
        if self.format is EngineKVFormat.NL_X_NB_BSV_BSS:
            if size % 4:
                raise LayoutError("head_bytes", size, "a multiple of 4 bytes for a page of values and scales")
            return 4
        for width in (16, 4, 2):
            if size % width == 0:
                return width
        raise LayoutError("head_bytes", size, "an even number of bytes")


@dataclasses.dataclass(frozen=True)
class KernelGroup:
    """Layers that one transfer launch serves, ascending, their pages, and what the engine says about them."""

    layer_indices: tuple[int, ...]
    geometry: PageGeometry
    info: EngineGroupInfo

    @property
    def tokens_per_block(self) -> int:
        """Logical tokens that one block id stands for."""
        return self.info.tokens_per_block or self.geometry.slots

    def num_slots(self, tokens: int) -> int:
        """Rows that `tokens` logical tokens take up."""
        return tokens * self.geometry.slots // self.tokens_per_block

    def num_blocks(self, tokens: int) -> int:
        """Whole pages that `tokens` logical tokens take up."""
        return self.num_slots(tokens) // self.geometry.slots

    def kept_tokens(self, chunk: int, full_window: bool = False) -> int:
        """Tokens of a chunk of `chunk` tokens that the group keeps: its window, when that is shorter."""
        window = self.info.window
        return chunk if full_window or window == -1 or window >= chunk else window

    def check_chunk(self, chunk: int) -> None:
        """Raises LayoutError unless chunks of `chunk` tokens are whole blocks, and so is a shorter window."""
        per_block = self.tokens_per_block
        if per_block % self.geometry.slots:
            raise LayoutError("tokens_per_block", per_block, f"a multiple of the page's {self.geometry.slots} slots")
        if chunk % per_block:
            raise LayoutError("chunk", chunk, f"a multiple of the block's {per_block} tokens")
        if 0 < self.info.window < chunk and self.info.window % per_block:
            raise LayoutError("window", self.info.window, f"a multiple of the block's {per_block} tokens")


def page_geometry(found: EngineKVFormat, tensors: Nested, num_layers: int) -> PageGeometry:
    """The pages of a kernel group from its first layer's tensor (a layer list), or its whole tensor.

    LayoutError for a format that has no axis of blocks, or pads them where transfers expect them tight.
    """
    traits = TRAITS[found]
    probe = tensors
    while not isinstance(probe, TensorView):
        probe = probe[0]
    if not traits.block_axis:
        raise LayoutError("format", found.name, "a format with an axis of blocks")
    blocks, slots, heads, size = _extents(found, probe, tensors)
    heads = 1 if traits.mla else heads
    stride = 0
    if traits.padded_blocks:
        stride = probe.strides[0]
    else:
        _check_tight(found, probe)
    return PageGeometry(found, traits.kv_size, num_layers, blocks, slots, heads, size, probe.dtype, stride)


def _extents(found: EngineKVFormat, probe: TensorView, tensors: Nested) -> tuple[int, int, int, int]:
    """`(blocks, slots, heads, head elements)` of a tensor, by the axes in its format's name."""
    names = {
        0: "B L 2 S H E", 1: "2 B S H E", 2: "B 2 S H E", 3: "B S E", 6: "2 B H S E", 7: "B 2 H S E", 8: "B L 2 H S E",
        9: "B S H E", 10: "B H S E", 11: "B S H E", 12: "B H S E", 13: "B S H E", 14: "B S E", 15: "2 B H 1 S E",
        16: "B S H E", 17: "B S 1 E", 18: "B S H E",
    }  # fmt: skip
    axes = names[int(found)].split()
    if len(axes) != probe.rank:
        raise LayoutError("shape", probe.shape, f"the axes {' '.join(axes)} of {found.name}")
    sizes = dict(zip(axes, probe.shape, strict=True))
    row = sizes["E"]
    if found is EngineKVFormat.NL_X_NP_X_NB_BS_ONE_HS and not isinstance(tensors, TensorView):
        planes = tensors[0] if not isinstance(tensors[0], TensorView) else tensors
        row = plane_row_elements([plane for plane in planes if isinstance(plane, TensorView)])
    return sizes["B"], sizes["S"], sizes.get("H", 1), row


def _check_tight(found: EngineKVFormat, probe: TensorView) -> None:
    tight = TensorView(probe.shape, probe.dtype).strides
    loose = [a for a, (s, t) in enumerate(zip(probe.strides, tight, strict=True)) if s != t and probe.shape[a] > 1]
    if loose:
        raise LayoutError("strides", probe.strides, f"tight blocks in {found.name}")


def group_layers(
    formats: Sequence[EngineKVFormat],
    tensors: Nested,
    infos: Sequence[EngineGroupInfo] = (),
    bugs: frozenset[str] = frozenset(),
) -> tuple[KernelGroup, ...]:
    """Kernel groups of an engine's layers, ordered by first layer; block ids are listed in that order.

    Layers share a group when planes, heads, head size, slots, engine group, dtype and format agree, and so do their
    number of blocks and block stride, which LMCache 0.5.6 leaves out of its key (bug `lmcache-group-key`). There is one
    of `infos` per kernel group in the resulting order, or none for an engine without groups; LayoutError if they do not
    describe what results.
    """
    members: dict[Any, list[int]] = {}
    geometries: dict[Any, PageGeometry] = {}
    engine_groups = engine_group_indices(infos, len(formats))
    for layer, found in enumerate(formats):
        engine_group = 0 if engine_groups is None else engine_groups[layer]
        if engine_group == EXCLUDED:
            continue
        together = TRAITS[found].structure is not Structure.LAYER_LIST
        geometry = page_geometry(found, tensors if together or isinstance(tensors, TensorView) else tensors[layer], 1)
        key: Any = (engine_group, geometry)
        if "lmcache-group-key" in bugs:
            key = (engine_group, dataclasses.replace(geometry, num_blocks=0, block_stride=0))
        members.setdefault(key, []).append(layer)
        geometries.setdefault(key, geometry)
    groups = [
        (tuple(layers), dataclasses.replace(geometries[key], num_layers=len(layers))) for key, layers in members.items()
    ]
    return tuple(_with_infos(groups, infos))


def _with_infos(
    groups: list[tuple[tuple[int, ...], PageGeometry]], infos: Sequence[EngineGroupInfo]
) -> list[KernelGroup]:
    if not infos:
        return [KernelGroup(layers, geometry, EngineGroupInfo(0, layers)) for layers, geometry in groups]
    described = [info.layer_indices for info in infos]
    if described != [layers for layers, _ in groups]:
        raise LayoutError("infos", described, f"the layers of each kernel group: {[layers for layers, _ in groups]}")
    return [KernelGroup(layers, geometry, info) for (layers, geometry), info in zip(groups, infos, strict=True)]


def engine_group_indices(infos: Sequence[EngineGroupInfo], num_layers: int) -> list[int] | None:
    """Engine group of each layer, `EXCLUDED` for layers of none; None without infos."""
    if not infos or not num_layers:
        return None
    indices = [EXCLUDED] * num_layers
    for info in infos:
        for layer in info.layer_indices:
            if not 0 <= layer < num_layers:
                raise LayoutError("layer_indices", layer, f"a layer index below {num_layers}")
            indices[layer] = info.engine_group_id
    return indices


def expand_block_ids(infos: Sequence[EngineGroupInfo], ids: Sequence[Any]) -> list[list[int]]:
    """Block ids per engine group, copied to every kernel group; a flat list belongs to group 0."""
    by_group = [list(entry) for entry in ids] if ids and not isinstance(ids[0], int) else [list(ids)]
    if not infos:
        return by_group
    return [list(by_group[info.engine_group_id]) for info in infos]


def slice_block_ids(
    ids: Mapping[int, Sequence[int]], tokens_per_block: Sequence[int], start: int, end: int
) -> list[list[int]]:
    """Block ids of the tokens `[start, end)`, on block grids, per engine group; empty for groups that have none."""
    sliced: list[list[int]] = []
    for group, per_block in enumerate(tokens_per_block):
        if per_block and (start % per_block or end % per_block):
            raise LayoutError("range", (start, end), f"multiples of group {group}'s {per_block} tokens a block")
        entry = ids.get(group, ())
        sliced.append(list(entry[start // per_block : end // per_block]) if per_block else [])
    return sliced

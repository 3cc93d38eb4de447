"""Byte ranges of blocks, by layer, group and tag, in the pools that RTP-LLM plans. Host-only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hkv.dialects.rtp_llm.planning import PoolGroup, PoolPlan
from hkv.errors import LayoutError
from hkv.layout.layer_cache import Region, partition_bytes, stack_regions


class Span(NamedTuple):
    """Consecutive bytes of a pool.

    Attributes:
      pool: index of the pool; the group's for independent pools, 0 for a shared one.
      offset: first byte.
      size: bytes.
    """

    pool: int
    offset: int
    size: int


@dataclasses.dataclass(frozen=True)
class Addresses:
    """Addresses of every block of every layer (RTP-LLM `KVCacheAllocator::convertIndexToAddr` and its relatives).

    A layer is named by its index; its group by its tag, which may be left out for a layer of one group. Block 0, though
    never handed out, has an address. The order of arguments is layer, block, tag everywhere.

    Attributes:
      plan: groups, strides and block counts, of the main model.
    """

    plan: PoolPlan

    def regions(self, group: PoolGroup) -> Region:
        """The bytes of a group's pool: all groups share one region in a shared pool."""
        if not self.plan.shared:
            return stack_regions(group.num_blocks, [(len(group.layers), group.stride, group.scale_stride)])[0]
        layers = max(len(each.layers) for each in self.plan.groups)
        return stack_regions(self.plan.num_blocks, [(layers, group.stride, group.scale_stride)])[0]

    def group(self, layer: int, tag: str | None = None) -> PoolGroup:
        """The group of a layer.

        Raises:
          LayoutError: the layer is not in a group of that tag; or no tag is given and it is not in exactly one.
        """
        groups = [group for group in self.plan.groups if layer in group.layers]
        if not groups:
            raise LayoutError("layer", layer, "the index of a layer that some group has")
        if tag is None:
            if len(groups) != 1:
                raise LayoutError("tag", None, f"one of layer {layer}'s: {', '.join(group.tag for group in groups)}")
            return groups[0]
        for group in groups:
            if group.tag == tag:
                return group
        raise LayoutError("tag", tag, f"one of layer {layer}'s: {', '.join(group.tag for group in groups)}")

    def address(self, layer: int, block: int, tag: str | None = None) -> tuple[int, int | None]:
        """First bytes of a block's keys and values and of its scales; None where there are no scales.

        A layer's place in its pool is its place in its group: two layers of different groups of a shared pool have
        the same place, and only their different blocks keep them apart.

        Raises:
          LayoutError: no such layer, block or tag.
        """
        group = self.group(layer, tag)
        region, place = self.regions(group), group.layers.index(layer)
        return region.kv_address(place, block), region.scale_address(place, block)

    def buffers(self, layer: int, block: int, tag: str | None = None) -> tuple[Span, ...]:
        """The block's bytes, and those of its scales.

        By layer alone, as long as the stride of the pool; by tag, in a shared pool, as long as the block of the group,
        without the scales of others.

        Raises:
          LayoutError: no such layer, block or tag.
        """
        group = self.group(layer, tag)
        sizes = (group.stride, group.scale_stride) if tag is None else self.own_sizes(group)
        return self._spans(group, self.address(layer, block, tag), sizes)

    def parts(self, layer: int, block: int, count: int, index: int, tag: str | None = None) -> tuple[Span, ...]:
        """One of `count` equal shares of a block's heads: K, V and, if there are any, their scales.

        Blocks that cannot be cut are given whole: latent ones, those with an indexer, and all of a shared pool of
        several groups.

        Raises:
          LayoutError: no such layer, block, tag or share; or the shares do not divide the heads.
        """
        group = self.group(layer, tag)
        address = self.address(layer, block, tag)
        whole = group.block.kind == "mla" or (self.plan.shared and len(self.plan.groups) > 1)
        if whole:
            return self._spans(group, address, (group.stride, group.scale_stride))
        spans = []
        for start, stride in zip(address, (group.stride, group.scale_stride), strict=True):
            if start is not None:
                half, heads = stride // 2, group.block.local_heads
                k, k_size, v, v_size = partition_bytes(stride, half, half, heads, count, index)
                pool = self.pool(group)
                spans += [Span(pool, start + k, k_size), Span(pool, start + v, v_size)]
        return tuple(spans)

    def copies(self, source: int, target: int, tag: str | None = None) -> Iterator[tuple[Span, Span]]:
        """Byte copies, each from a source span to a target span, that give one block another's content in all layers.

        Args:
          source: the block to copy.
          target: the block to overwrite.
          tag: the group; left out, all groups, of which every layer must then have exactly one.

        Raises:
          LayoutError: no such block or tag, or a layer of several groups and no tag.
        """
        if tag is not None and tag not in [group.tag for group in self.plan.groups]:
            raise LayoutError("tag", tag, f"one of {', '.join(group.tag for group in self.plan.groups)}")
        for group in self.plan.groups:
            for layer in group.layers if tag in (None, group.tag) else ():
                self.group(layer, tag)
                sizes = self.own_sizes(group)
                ends = (self._spans(group, self.address(layer, b, group.tag), sizes) for b in (source, target))
                yield from zip(*ends, strict=True)

    def pool(self, group: PoolGroup) -> int:
        """Index of a group's pool."""
        return 0 if self.plan.shared else self.plan.groups.index(group)

    def own_sizes(self, group: PoolGroup) -> tuple[int, int]:
        """Bytes of a group's own block and of its scales, without the padding of a shared pool."""
        padded = self.plan.shared and len(self.plan.groups) > 1
        return (group.block.bytes, group.block.scale) if padded else (group.stride, group.scale_stride)

    def _spans(self, group: PoolGroup, address: tuple[int, int | None], sizes: Sequence[int]) -> tuple[Span, ...]:
        pairs = zip(address, sizes, strict=True)
        return tuple(Span(self.pool(group), start, size) for start, size in pairs if start is not None and size)

"""Byte ranges of blocks, by layer, group and tag, in the pools that RTP-LLM plans. Host-only."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hkv.dialects.rtp_llm.planning import PoolGroup, PoolPlan
from hkv.errors import LayoutError
from hkv.layout.layer_cache import Region, partition_bytes, stack_regions


class ByteSpan(NamedTuple):
    """Consecutive bytes of a pool.

    Attributes:
      pool: index of the pool; the group's for independent pools, 0 for a shared one.
      offset: first byte.
      size: bytes.
    """

    pool: int
    offset: int
    size: int


class Home(NamedTuple):
    """Place of a layer in a pool.

    Attributes:
      group: the layer's group: the target's, or the draft module's of that tag.
      pool: index of the pool.
      region: the bytes of the layer's model in the pool.
      slot: the layer's slot in the region.
    """

    group: PoolGroup
    pool: int
    region: Region
    slot: int


@dataclasses.dataclass(frozen=True)
class Addresses:
    """Addresses of every block of every layer (RTP-LLM `KVCacheAllocator::convertIndexToAddr` and its relatives).

    A layer is named by its index, draft modules' layers by the numbers after the target's; its group by its tag, which
    may be left out for a layer of one group. Block 0, though never handed out, has an address. The order of arguments
    is layer, block, tag everywhere.

    Attributes:
      plan: groups, strides and block counts, of the main model and its draft modules.
    """

    plan: PoolPlan

    @functools.cached_property
    def pools(self) -> tuple[tuple[Region, ...], ...]:
        """Regions of each pool: the target's, then those of the draft modules that have layers in it."""
        if self.plan.shared:
            return (stack_regions(self.plan.num_blocks, [_strides(groups) for groups in self._models]),)
        return tuple(
            stack_regions(
                group.num_blocks, [_strides([groups[index]]) for groups in self._models_of(index)], scales_last=True
            )
            for index, group in enumerate(self.plan.groups)
        )

    @property
    def _models(self) -> tuple[tuple[PoolGroup, ...], ...]:
        """Groups of the target and of each draft module."""
        return (self.plan.groups, *self.plan.modules)

    def _models_of(self, index: int) -> list[tuple[PoolGroup, ...]]:
        """Models with layers in the group at an index."""
        return [groups for groups in self._models if groups[index].layers]

    def pool_sizes(self) -> tuple[int, ...]:
        """Bytes of each pool."""
        return tuple(regions[-1].end for regions in self.pools)

    def homes(self, layer: int) -> tuple[Home, ...]:
        """Places of a layer, one for each of its groups, in the order of the groups.

        Raises:
          LayoutError: no group has the layer.
        """
        found = []
        for groups in self._models:
            for index, group in enumerate(groups):
                if layer in group.layers:
                    pool = 0 if self.plan.shared else index
                    models = self._models if self.plan.shared else self._models_of(index)
                    region = self.pools[pool][models.index(groups)]
                    found.append(Home(group, pool, region, group.layers.index(layer)))
        if not found:
            raise LayoutError("layer", layer, "the index of a layer that some group has")
        return tuple(found)

    def home(self, layer: int, tag: str | None = None) -> Home:
        """Place of a layer in its group.

        Raises:
          LayoutError: the layer is not in a group of that tag; or no tag is given and it is not in exactly one.
        """
        homes = self.homes(layer)
        expected = f"one of layer {layer}'s: {', '.join(home.group.tag for home in homes)}"
        if tag is None:
            if len(homes) != 1:
                raise LayoutError("tag", None, expected)
            return homes[0]
        for home in homes:
            if home.group.tag == tag:
                return home
        raise LayoutError("tag", tag, expected)

    def group(self, layer: int, tag: str | None = None) -> PoolGroup:
        """The group of a layer.

        Raises:
          LayoutError: as `home`.
        """
        return self.home(layer, tag).group

    def address(self, layer: int, block: int, tag: str | None = None) -> tuple[int, int | None]:
        """First bytes of a block's keys and values and of its scales; None where there are no scales.

        A layer's place in its pool is its place in its group: two layers of different groups of a shared pool have
        the same place, and only their different blocks keep them apart.

        Raises:
          LayoutError: no such layer, block or tag.
        """
        home = self.home(layer, tag)
        return home.region.kv_address(home.slot, block), home.region.scale_address(home.slot, block)

    def buffers(self, layer: int, block: int, tag: str | None = None) -> tuple[ByteSpan, ...]:
        """The block's bytes, and those of its scales.

        By layer alone, as long as the stride of the pool; by tag, in a shared pool, as long as the block of the group,
        without the scales of others.

        Raises:
          LayoutError: no such layer, block or tag.
        """
        home = self.home(layer, tag)
        sizes = (home.group.stride, home.group.scale_stride) if tag is None else self.own_sizes(home.group)
        return _spans(home, block, sizes)

    def parts(self, layer: int, block: int, count: int, index: int, tag: str | None = None) -> tuple[ByteSpan, ...]:
        """One of `count` equal shares of a block's heads: K, V and, if there are any, their scales.

        Blocks that cannot be cut are given whole: latent ones, those with an indexer, and those of a shared pool of
        several groups, a draft module's apart.

        Raises:
          LayoutError: no such layer, block, tag or share; or the shares do not divide the heads.
        """
        home = self.home(layer, tag)
        group = home.group
        mixed = self.plan.shared and len(self.plan.groups) > 1 and group in self.plan.groups
        if group.block.kind == "mla" or mixed:
            return _spans(home, block, (group.stride, group.scale_stride))
        spans = []
        for whole in _spans(home, block, (group.stride, group.scale_stride)):
            half, heads = whole.size // 2, group.block.local_heads
            k, k_size, v, v_size = partition_bytes(whole.size, half, half, heads, count, index)
            spans += [ByteSpan(home.pool, whole.offset + k, k_size), ByteSpan(home.pool, whole.offset + v, v_size)]
        return tuple(spans)

    def copies(self, source: int, target: int, tag: str | None = None) -> Iterator[tuple[ByteSpan, ByteSpan]]:
        """Byte copies, each from a source span to a target span, that give one block another's content in all layers.

        Draft modules' layers are copied with their group's.

        Args:
          source: the block to copy.
          target: the block to overwrite.
          tag: the group; left out, all groups, of which every layer must then have exactly one.

        Raises:
          LayoutError: no such block or tag, or a layer of several groups and no tag.
        """
        if tag is not None and tag not in [group.tag for group in self.plan.groups]:
            raise LayoutError("tag", tag, f"one of {', '.join(group.tag for group in self.plan.groups)}")
        for group in (group for groups in self._models for group in groups):
            for layer in group.layers if tag in (None, group.tag) else ():
                self.home(layer, tag)
                home, sizes = self.home(layer, group.tag), self.own_sizes(group)
                ends = (_spans(home, block, sizes) for block in (source, target))
                yield from zip(*ends, strict=True)

    def own_sizes(self, group: PoolGroup) -> tuple[int, int]:
        """Bytes of a group's own block and of its scales, without the padding of a shared pool."""
        padded = self.plan.shared and len(self.plan.groups) > 1
        return (group.block.bytes, group.block.scale) if padded else (group.stride, group.scale_stride)


def _strides(groups: Sequence[PoolGroup]) -> tuple[int, int, int]:
    """Layer slots of one model's region, as many as its longest group's, and the strides of its first with layers."""
    first = next(group for group in groups if group.layers)
    return max(len(group.layers) for group in groups), first.stride, first.scale_stride


def _spans(home: Home, block: int, sizes: Sequence[int]) -> tuple[ByteSpan, ...]:
    starts = (home.region.kv_address(home.slot, block), home.region.scale_address(home.slot, block))
    pairs = zip(starts, sizes, strict=True)
    return tuple(ByteSpan(home.pool, start, size) for start, size in pairs if start is not None and size)

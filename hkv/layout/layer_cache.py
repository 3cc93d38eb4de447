"""RTP-LLM's pools: layer-major regions of keys, values and scales, and what each layer sees of them.

A shared pool holds its models' regions back to back, `[main kv][main scales][draft kv][draft scales]...`; a group's own
pool all blocks before all scales. Inside a region layer comes before block. Main branch of RTP-LLM,
`BlockPoolConfigHelper`, `MemoryLayoutStrategy` and `LayerKVCache`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from hkv.errors import LayoutError
from hkv.layout.strided import StridedView, check_index, dense_strides
from hkv.spec.dtypes import item_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Region:
    """One model's layers in a pool.

    Attributes:
      num_layers: layer slots; in a shared hybrid pool they are shared by the groups.
      num_blocks: blocks, the reserved block 0 included.
      kv_stride: bytes of one block of one layer.
      scale_stride: bytes of that block's scales, 0 for none.
      kv_offset: byte of layer 0, block 0.
      scale_offset: byte of the scales of layer 0, block 0.
    """

    num_layers: int
    num_blocks: int
    kv_stride: int
    scale_stride: int
    kv_offset: int
    scale_offset: int

    @property
    def end(self) -> int:
        """First byte after the region."""
        return self.scale_offset + self.num_layers * self.num_blocks * self.scale_stride

    def kv_address(self, layer: int, block: int) -> int:
        """First byte of a block of a layer; block 0 is addressable."""
        return self.kv_offset + self._index(layer, block) * self.kv_stride

    def scale_address(self, layer: int, block: int) -> int | None:
        """First byte of a block's scales, None where there are none."""
        index = self._index(layer, block)
        return self.scale_offset + index * self.scale_stride if self.scale_stride else None

    def _index(self, layer: int, block: int) -> int:
        check_index("layer", layer, self.num_layers)
        check_index("block", block, self.num_blocks)
        return layer * self.num_blocks + block


def stack_regions(
    num_blocks: int, strides: Sequence[tuple[int, int, int]], *, scales_last: bool = False
) -> tuple[Region, ...]:
    """The regions of one pool, of as many blocks each: every model's scales behind its own blocks, or behind all.

    `strides` are, for each model, the main one first, (layers, bytes of a block, bytes of its scales or 0).
    """
    regions: list[Region] = []
    offset = 0
    scales = num_blocks * sum(num_layers * kv_stride for num_layers, kv_stride, _ in strides)
    for num_layers, kv_stride, scale_stride in strides:
        if min(num_blocks, num_layers, kv_stride) < 1 or scale_stride < 0:
            raise LayoutError("strides", (num_layers, kv_stride, scale_stride), "positive numbers, 0 for no scales")
        behind = offset + num_layers * num_blocks * kv_stride
        region = Region(
            num_layers=num_layers,
            num_blocks=num_blocks,
            kv_stride=kv_stride,
            scale_stride=scale_stride,
            kv_offset=offset,
            scale_offset=scales if scales_last else behind,
        )
        regions.append(region)
        scales, offset = region.end, behind if scales_last else region.end
    return tuple(regions)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCache:
    """Cache of one layer of one group, as the layer's kernels see it (RTP-LLM `LayerKVCache`).

    Attributes:
      tag: the group's tag.
      layer: layer slot in the region; of a planned cache, the layer's global index.
      kv: the layer's keys and values, axis 0 counting `kernel_blocks` for each block.
      scale: its scales, or None.
      tokens_per_block: tokens in one row of axis 0.
      kernel_blocks: rows of axis 0 in one block of the block table; block p is rows `p * kernel_blocks` and on.
      pool: index of the pool in which all of it lies.
      parts: the same bytes by what they are (`key`, `value`, `key_scale`, `latent`, `rope`, `state`, `conv`, `entry`):
        `[rows, heads, states, *shape]` each, of the part's own element type.
    """

    tag: str
    layer: int
    kv: StridedView
    scale: StridedView | None
    tokens_per_block: int
    kernel_blocks: int
    pool: int = 0
    parts: Mapping[str, StridedView] = dataclasses.field(default_factory=lambda: MappingProxyType({}), hash=False)


def mha_layer(
    region: Region, layer: int, *, tag: str, dtype: str, heads: int, head_size: int, tokens: int, kernel_tokens: int
) -> LayerCache:
    """Multi-head attention: `[rows, 2, heads, kernel_tokens, head_size]`, K before V in each kernel block.

    With several kernel blocks a block, K and V alternate: the halves of a physical block, which has `tokens` tokens,
    are not K and V. Heads are those of this rank; `layer` is a slot of the region.
    """
    pieces = _pieces(tokens, kernel_tokens)
    shape = (region.num_blocks * pieces, 2, heads, kernel_tokens, head_size)
    block = 2 * heads * tokens * head_size * item_bytes(dtype)
    if block != region.kv_stride:
        raise LayoutError(
            "kv_stride", region.kv_stride, f"exactly {block}, the bytes of 2x{heads}x{tokens}x{head_size}"
        )
    kv = _dense(shape, region.kv_address(layer, 0), dtype)
    scale = _scales(region, layer, "float32", (pieces,))
    return LayerCache(tag=tag, layer=layer, kv=kv, scale=scale, tokens_per_block=kernel_tokens, kernel_blocks=pieces)


def mla_layer(region: Region, layer: int, *, tag: str, dtype: str, tokens: int, kernel_tokens: int) -> LayerCache:
    """Latent attention: `[rows, kernel_tokens, elements]`; scales or indexer keys `[rows, kernel_tokens, bytes]`."""
    pieces = _pieces(tokens, kernel_tokens)
    elements = _divide("kv_stride", region.kv_stride, tokens * item_bytes(dtype))
    kv = _dense((region.num_blocks * pieces, kernel_tokens, elements), region.kv_address(layer, 0), dtype)
    scale = _scales(region, layer, "uint8", (pieces, kernel_tokens))
    return LayerCache(tag=tag, layer=layer, kv=kv, scale=scale, tokens_per_block=kernel_tokens, kernel_blocks=pieces)


def opaque_layer(
    region: Region, layer: int, *, tag: str, dtype: str, tokens: int, kernel_tokens: int, scale_dtype: str = "uint8"
) -> LayerCache:
    """Keys and values, or states, of which only the size is known: `[rows, elements]`.

    States of linear attention, of sliding windows and opaque ones are never split: in a shared hybrid pool a
    block is as large as the full-attention group's, so a state fills only its beginning.
    """
    pieces = _pieces(tokens, kernel_tokens)
    elements = _divide("kv_stride", region.kv_stride, pieces * item_bytes(dtype))
    kv = _dense((region.num_blocks * pieces, elements), region.kv_address(layer, 0), dtype)
    scale = _scales(region, layer, scale_dtype, ())
    return LayerCache(tag=tag, layer=layer, kv=kv, scale=scale, tokens_per_block=kernel_tokens, kernel_blocks=pieces)


def partition_bytes(full: int, key: int, value: int, heads: int, count: int, index: int) -> tuple[int, int, int, int]:
    """Byte ranges of one of `count` equal shares of a block's heads (RTP-LLM `splitKVPartitionBytes`).

    Only true for blocks that are `[K of all heads][V of all heads]`, that is, with one kernel block a block: `full`
    bytes, of which `key` and `value`. Gives (offset of K, bytes of K, offset of V, bytes of V), from the block's start.
    """
    if count < 1 or not 0 <= index < count:
        raise LayoutError("index", index, f"a share from 0 to {count - 1}")
    if key + value != full:
        raise LayoutError("full", full, f"{key} + {value}, the bytes of K and V")
    if heads < 1 or key % heads or value % heads or heads % count:
        raise LayoutError("heads", heads, f"a divisor of {key} and {value}, and a multiple of {count}")
    share = heads // count
    key_bytes, value_bytes = share * (key // heads), share * (value // heads)
    return index * key_bytes, key_bytes, key + index * value_bytes, value_bytes


def _pieces(tokens: int, kernel_tokens: int) -> int:
    if kernel_tokens < 1 or tokens % kernel_tokens:
        raise LayoutError("kernel_tokens", kernel_tokens, f"a divisor of the block's {tokens} tokens")
    return tokens // kernel_tokens


def _divide(name: str, value: int, divisor: int) -> int:
    if value % divisor:
        raise LayoutError(name, value, f"a multiple of {divisor} bytes")
    return value // divisor


def _scales(region: Region, layer: int, dtype: str, inner: tuple[int, ...]) -> StridedView | None:
    """A region's scales `[blocks * inner[0], *inner[1:], rest]`; `inner` empty keeps `[blocks, rest]`."""
    offset = region.scale_address(layer, 0)
    if offset is None:
        return None
    rest = _divide("scale_stride", region.scale_stride, math.prod(inner) * item_bytes(dtype))
    rows = region.num_blocks * (inner[0] if inner else 1)
    return _dense((rows, *inner[1:], rest), offset, dtype)


def _dense(shape: tuple[int, ...], offset: int, dtype: str) -> StridedView:
    return StridedView(shape, dense_strides(shape, item_bytes(dtype)), offset, dtype)

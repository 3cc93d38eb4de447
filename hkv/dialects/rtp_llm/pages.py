"""Layouts of RTP-LLM's pages: what `hkv.paged` moves in its pools, one for keys and values, one for scales. Host-only.

Layer comes before block; a block is `kernel_blocks` kernel blocks back to back, and every kernel block has its own K
and V. Scales lie behind all blocks, in the same order of layers, blocks and kernel blocks.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction

from hkv.dialects.rtp_llm.planning import PoolGroup
from hkv.dialects.rtp_llm.planning.sizes import FLOAT8, BlockBytes
from hkv.layout.block_layout import Layout
from hkv.layout.content import Part
from hkv.layout.layer_cache import Region
from hkv.layout.orders import Order
from hkv.spec.dtypes import item_bytes


@dataclasses.dataclass(frozen=True)
class Pages:
    """Pages of one group's layers of one model, the target or a draft module.

    Attributes:
      layers: global indices of the layers, in the order of the layouts' layer axis.
      pool: index of the pool.
      kv: layout of the blocks; block ids are those of the block table, kernels' are `paged.operations.kernel_blocks`'.
      scale: layout of their scales, or of the keys of a sparse indexer; None where there are none.
    """

    layers: tuple[int, ...]
    pool: int
    kv: Layout
    scale: Layout | None

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Both layouts, or the one."""
        return (self.kv,) if self.scale is None else (self.kv, self.scale)

    def layout_of(self, part: str) -> Layout:
        """The layout that has a part.

        Raises:
          LayoutError: none has.
        """
        for layout in self.layouts[1:]:
            if part in [each.name for each in layout.content]:
                return layout
        self.kv.part(part)
        return self.kv


def pages_of(group: PoolGroup, region: Region, pool: int) -> Pages:
    """The pages of a group's layers in a region.

    Args:
      group: the group, of the target or a draft module; it has layers.
      region: the model's bytes in the group's pool.
      pool: index of the pool.

    Raises:
      LayoutError: blocks that kernel blocks do not divide.
    """
    block = group.block
    shape, tokens, parts = _content(block, group.kernel_blocks)
    kv = _layout(group, region.kv_offset, region.kv_stride, region.num_blocks, shape, tokens, parts)
    scale = None
    if block.scale:
        shape, parts = _scales(block, group.kernel_blocks)
        scale = _layout(group, region.scale_offset, region.scale_stride, region.num_blocks, shape, 1, parts)
    return Pages(group.layers, pool, kv, scale)


Shape = tuple[int, int, int]
"""Head slots, states and bytes of a state in one kernel block."""


def _content(block: BlockBytes, pieces: int) -> tuple[Shape, int | Fraction | None, tuple[Part, ...]]:
    """Shape of a kernel block, tokens of a state, and parts."""
    tokens = block.seq_size // pieces
    if block.kind == "mha":
        heads = block.local_heads
        size = block.k_elems // (heads * block.seq_size)
        key = Part(name="key", dtype=block.dtype, shape=(size,), offset=0, first_head=0, heads=heads)
        value = dataclasses.replace(key, name="value", first_head=heads)
        return (2 * heads, tokens, size * item_bytes(block.dtype)), 1, (key, value)
    if block.kind == "mla":
        return (1, tokens, block.bytes // block.seq_size), 1, _latent(block)
    if block.kind == "linear":
        named = zip(("state", "conv"), block.spec.state_tensors, strict=True)
        return (1, 1, block.bytes), None, _adjoining([(name, dtype, shape) for name, (shape, dtype) in named])
    return _entries(block)


def _latent(block: BlockBytes) -> tuple[Part, ...]:
    """Latent and rotary key; of float8, a float32 scale for each 128 elements between them."""
    lora, rope = block.k_elems // block.seq_size, block.v_elems // block.seq_size
    if block.dtype not in FLOAT8:
        return _adjoining([("latent", block.dtype, (lora,)), ("rope", block.dtype, (rope,))])
    scales = [("latent_scale", "float32", (lora // 128,))] if lora >= 128 else []
    parts = _adjoining([("latent", block.dtype, (lora,)), *scales, ("rope", "bfloat16", (rope,))])
    token = block.bytes // block.seq_size
    if token % 4 or any(part.offset % item_bytes(part.dtype) for part in parts):
        return (Part(name="packed", dtype="uint8", shape=(token,), offset=0),)
    return parts


def _entries(block: BlockBytes) -> tuple[Shape, int | Fraction | None, tuple[Part, ...]]:
    """Entries of a region; of one that several ranks hold slices of, bytes."""
    if block.slices > 1:
        return (1, 1, block.bytes), None, (Part(name="slice", dtype="uint8", shape=(block.bytes,), offset=0),)
    size = block.payload // block.entries
    shape = (size // item_bytes(block.dtype),)
    entry = Part(name="entry", dtype=block.dtype, shape=shape, offset=0)
    return (1, block.entries, size), block.tokens_per_entry, (entry,)


def _scales(block: BlockBytes, pieces: int) -> tuple[Shape, tuple[Part, ...]]:
    tokens = block.seq_size // pieces
    if block.kind == "mla":
        size = block.scale // block.seq_size
        return (1, tokens, size), (Part(name="indexer", dtype="uint8", shape=(size,), offset=0),)
    heads = block.local_heads
    key = Part(name="key_scale", dtype="float32", shape=(), offset=0, first_head=0, heads=heads)
    return (2 * heads, tokens, 4), (key, dataclasses.replace(key, name="value_scale", first_head=heads))


def _adjoining(fields: list[tuple[str, str, tuple[int, ...]]]) -> tuple[Part, ...]:
    parts: list[Part] = []
    for name, dtype, shape in fields:
        offset = parts[-1].offset + parts[-1].nbytes if parts else 0
        parts.append(Part(name=name, dtype=dtype, shape=shape, offset=offset))
    return tuple(parts)


def _layout(
    group: PoolGroup,
    offset: int,
    stride: int,
    num_blocks: int,
    shape: Shape,
    tokens: int | Fraction | None,
    parts: tuple[Part, ...],
) -> Layout:
    """The layout of a group's layers, a kernel block `[heads, states, bytes]` at its beginning."""
    heads, states, content = shape
    pieces = group.kernel_blocks
    return Layout(
        order=Order.parse("LBHNC"),
        shape=(len(group.layers), num_blocks * pieces, heads, states, content),
        strides=(num_blocks * stride, stride // pieces, states * content, content, 1),
        offset=offset,
        num_blocks=num_blocks,
        split=pieces,
        kernel_step=pieces,
        page_size=stride,
        dtype=parts[0].dtype,
        tokens_per_state=tokens,
        content=parts,
    )

"""Placements: where each element of keys, values, latents and scales lies, in the layouts that kernels meet.

A placement is a family of addresses by name. Six families are the orders of a `Layout`, in which a key and its value
share a cell. In the others keys and values lie apart, and the name is the physical order of the axes, outermost first:
L layers, 2 keys and values, B blocks, N slots of a block, H heads, D elements. `L2BNHD` holds all keys of a layer
before all its values, `LB2NHD` alternates within each block, `2LBNHD` is a list of key tensors and one of value
tensors. `pool` is a layer-major pool whose kernel blocks alternate keys and values (`hkv.layout.layer_cache`).

The reference's operations ask a placement what they ask a `Layout`: addresses of elements, and runs of whole blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from hkv.errors import LayoutError
from hkv.layout.block_layout import Layout
from hkv.layout.content import Part, quantize
from hkv.layout.layer_cache import mha_layer, stack_regions
from hkv.layout.orders import Order
from hkv.layout.strided import StridedView
from hkv.spec import FullAttention, MLAAttention
from hkv.spec.dtypes import item_bytes

ORDERS = tuple(order.value for order in Order)
APART = ("L2BNHD", "L2BHND", "LB2NHD", "LB2HND", "BL2NHD", "BL2HND", "2LBNHD", "2LBHND")
FAMILIES = (*ORDERS, *APART, "pool", "halves")
"""Names of all families; `halves` holds each head's keys of a block before its values (CPU attention)."""

SCALED = "int8 with scales"
"""Content of int8 elements and one float32 scale for each token, head and side."""

CONTENTS = MappingProxyType(
    {
        "keys and values": ("key", "value"),
        "latent": ("latent",),
        SCALED: ("key", "value", "key_scale", "value_scale"),
    }
)
"""Contents of a cell, each with its parts."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """Addresses of one spec's layers in a flat buffer of bytes.

    Attributes:
      family: one of `FAMILIES`.
      content: the parts of a cell.
      cells: per part, `[layers, blocks, kernel blocks of a block, heads, slots of a kernel block, *shape]`.
      end: first byte after the last one of any element.
      layout: the same as a `Layout`, None where that cannot say it.
      whole: per view, the bytes that belong to blocks; copies and zeroing visit them.
    """

    family: str
    content: tuple[Part, ...]
    cells: Mapping[str, StridedView]
    end: int
    layout: Layout | None
    whole: tuple[StridedView, ...]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Layers, kernel-block rows, heads and slots of a kernel block; the reference asks for the heads."""
        layers, blocks, pieces, heads, states = self.cells[self.content[0].name].shape[:5]
        return layers, blocks * pieces, heads, states

    @property
    def num_layers(self) -> int:
        """Layers laid out."""
        return self.shape[0]

    @property
    def num_blocks(self) -> int:
        """Manager blocks, which block tables name."""
        return self.cells[self.content[0].name].shape[1]

    @property
    def pieces(self) -> int:
        """Kernel blocks in a manager block."""
        return self.cells[self.content[0].name].shape[2]

    @property
    def states_per_block(self) -> int:
        """Slots of a manager block."""
        return self.pieces * self.shape[3]

    def part(self, name: str) -> Part:
        """The part of that name; LayoutError if it has none."""
        for part in self.content:
            if part.name == name:
                return part
        raise LayoutError("part", name, f"one of {', '.join(self.cells)}")

    def element_address(self, part: str, layer: int, block: int, head: int, state: int, *index: int) -> int:
        """First byte of an element."""
        piece, inside = divmod(state, self.shape[3])
        return self.cells[part].address(layer, block, piece, head, inside, *index)

    def block_runs(self, layer: int, block: int) -> tuple[tuple[int, int], ...]:
        """The bytes of one block of one layer that carry data, as (first byte, bytes)."""
        return tuple(run for view in self.whole for run in view.select(0, layer).select(0, block).runs())

    def rows_view(self, part: str, layer: int | None) -> StridedView:
        """One part with its kernel blocks as one axis: `[rows, heads, slots, *shape]`, layers before them for None."""
        view = self.cells[part]
        layers, blocks, pieces, *inner = view.shape
        row = view.strides[2] if pieces > 1 else view.strides[1]
        shape, strides = (layers, blocks * pieces, *inner), (view.strides[0], row, *view.strides[3:])
        rows = StridedView(shape, strides, view.offset, view.dtype)
        return rows if layer is None else rows.select(0, layer)

    def natural_view(self, layer: int) -> StridedView | None:
        """Keys and values of one layer as the one tensor that engines allocate, in the family's own order of axes.

        `[rows, ..., 2, ...]` where keys and values lie apart, else `[rows, heads, slots, elements of both]`; None for
        `halves`, and for parts that do not share an element type.
        """
        if self.layout is not None:
            return None if self.family == "halves" else self.layout.layer_view(layer)
        if {part.name for part in self.content} != {"key", "value"}:
            return None
        key, value = (self.rows_view(name, layer) for name in ("key", "value"))
        shape, strides = (2, *key.shape), (value.offset - key.offset, *key.strides)
        letters = [letter for letter in self.family.replace("pool", "LB2HND") if letter != "L"]
        both = StridedView(shape, strides, key.offset, key.dtype)
        return both.reordered([("2", "B", "H", "N", "D").index(letter) for letter in letters])


def place(
    family: str,
    content: str,
    dtype: str,
    *,
    block_size: int,
    heads: int,
    key_size: int,
    value_size: int,
    blocks: int,
    layers: int,
    pieces: int = 1,
    padding: int = 0,
    offset: int = 0,
) -> Placement:
    """The placement of these sizes; LayoutError where the family cannot hold them.

    Args:
      family: one of `FAMILIES`.
      content: one of `CONTENTS`.
      dtype: element type of keys, values or latents.
      block_size: slots of a manager block.
      heads: heads of keys and values; 1 for latents.
      key_size: elements of a key, or of a latent.
      value_size: elements of a value.
      blocks: manager blocks, the null block included.
      layers: layers.
      pieces: kernel blocks in a manager block.
      padding: bytes after each page, in families where a page is one run.
      offset: first byte of the first block of the first layer.
    """
    if family == "halves" and content != "keys and values":
        raise LayoutError("layout", family, "an order: halves hold keys and values")
    if family in ORDERS or family == "halves":
        page = {"block_size": block_size, "dtype": dtype}
        if content == "latent":
            spec = MLAAttention(head_size=key_size, **page)
        else:
            spec = FullAttention(num_kv_heads=heads, head_size=key_size, head_size_v=value_size, **page)
        if content == SCALED:
            spec = quantize(spec, "int8_per_token_head")
        if family == "halves":
            spec = dataclasses.replace(spec, quantization="kv_halves")
        if padding:
            spec = dataclasses.replace(spec, page_size_padded=spec.page_size_bytes + padding)
        order = "LBHNC" if family == "halves" else family
        kernel = None if pieces == 1 else block_size // pieces
        made = Layout.of_spec(
            spec, order, num_blocks=blocks, num_layers=layers, offset=offset, kernel_block_size=kernel
        )
        return of_layout(made, family)
    if content != "keys and values" or key_size != value_size:
        raise LayoutError("layout", family, "an order with cells: keys and values of two sizes, or other parts")
    sizes = {"L": layers, "2": 2, "B": blocks, "P": pieces, "N": block_size // pieces, "H": heads, "D": key_size}
    if family == "pool":
        return _pool(dtype, sizes, block_size, offset)
    return _apart(family, dtype, sizes, padding, offset)


def of_layout(layout: Layout, family: str = "") -> Placement:
    """A `Layout` as a placement."""
    cells = {part.name: layout.part_cells(part.name) for part in layout.content}
    bytes_of_blocks = layout.cells()
    return Placement(family or layout.order.value, layout.content, cells, layout.end, layout, (bytes_of_blocks,))


def _apart(family: str, dtype: str, sizes: Mapping[str, int], padding: int, offset: int) -> Placement:
    """Strides from the innermost axis outwards; a page is padded where everything inside of B is one page."""
    strides, step = {}, item_bytes(dtype)
    for letter in reversed(family.replace("B", "BP")):
        if letter == "P" and padding:
            if family.index("B") > family.index("2"):
                raise LayoutError("padding", padding, f"0: {family} has keys and values in different tensors")
            if sizes["P"] > 1:
                raise LayoutError("padding", padding, "0: padded pages cannot be split")
            step += -(-padding // item_bytes(dtype)) * item_bytes(dtype)
        strides[letter] = step
        step *= sizes[letter]
    letters = "LBPHND"
    shape = tuple(sizes[letter] for letter in letters)
    both = tuple(
        StridedView(shape, tuple(strides[letter] for letter in letters), offset + side * strides["2"], dtype)
        for side in range(2)
    )
    return _keys_and_values(family, dtype, sizes["D"], both)


def _pool(dtype: str, sizes: Mapping[str, int], block_size: int, offset: int) -> Placement:
    """A layer-major pool of one model."""
    stride = 2 * sizes["H"] * block_size * sizes["D"] * item_bytes(dtype)
    (region,) = stack_regions(sizes["B"], [(sizes["L"], stride, 0)])
    first = mha_layer(
        dataclasses.replace(region, kv_offset=offset),
        0,
        tag="full",
        dtype=dtype,
        heads=sizes["H"],
        head_size=sizes["D"],
        tokens=block_size,
        kernel_tokens=sizes["N"],
    )
    keys, values = (first.kv.select(1, side) for side in range(2))
    shape = (sizes["L"], sizes["B"], sizes["P"], sizes["H"], sizes["N"], sizes["D"])
    strides = (region.num_blocks * stride, stride, *keys.strides)
    both = tuple(StridedView(shape, strides, side.offset, dtype) for side in (keys, values))
    return _keys_and_values("pool", dtype, sizes["D"], both)


def _keys_and_values(family: str, dtype: str, size: int, both: tuple[StridedView, ...]) -> Placement:
    parts = tuple(Part(name=name, dtype=dtype, shape=(size,), offset=0) for name in ("key", "value"))
    end = max(view.end for view in both)
    return Placement(family, parts, dict(zip(("key", "value"), both, strict=True)), end, None, both)

"""Block layouts: the logical axes [L, B, H, N, C] of a cache, their physical order, strides, padding and splits.

L counts layers, B blocks, H head slots, N states in a block and C bytes of one state of one head (vLLM 0.33
`KVCacheLayout`). A layout is a value that travels with the buffer: nothing here is ever guessed from a shape.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from fractions import Fraction

from hkv.errors import LayoutError
from hkv.layout.content import Part, content_parts
from hkv.layout.orders import Axes, B, C, H, L, N, Order, aligned_block_stride, check_split, order_strides
from hkv.layout.strided import StridedView, check_index, copy_width
from hkv.spec import LayerSpec
from hkv.spec.dtypes import item_bytes

__all__ = ["ElementPlace", "Layout", "Order", "Place", "StridedView", "copy_width", "order_strides"]


@dataclasses.dataclass(frozen=True)
class Place:
    """One byte of a cache by its logical coordinates: head slot and state of a manager block, byte in their content."""

    layer: int
    block: int
    head: int
    state: int
    byte: int


@dataclasses.dataclass(frozen=True)
class ElementPlace:
    """One byte of a cache by what it is part of: byte of an element of a part (`key`, `value_scale`, `state0`, ...).

    `index` has one number for each axis of the part's shape; head and state are those of the manager block.
    """

    part: str
    layer: int
    block: int
    head: int
    state: int
    index: tuple[int, ...]
    byte: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Placement of one spec's layers in a flat byte buffer. Frozen and hashable: it can be a static argument.

    A manager block is what the block table names. `split` kernel blocks make up one of them: kernel block `j` of
    manager block `b` is row `b * kernel_step + j` of the B axis.

    Attributes:
      order: physical order of the axes.
      shape: (layers, kernel-block rows, head slots, states in a kernel block, content bytes).
      strides: bytes between neighbours along each axis.
      offset: byte of layer 0, block 0.
      num_blocks: manager blocks.
      split: kernel blocks in one manager block.
      kernel_step: kernel-block rows from one manager block to the next; more than `split` when pages of other layers
        lie between.
      page_size: bytes of one layer's manager block, padding included.
      dtype: element type of the engine's own view.
      tokens_per_state: tokens that share a state, a fraction 1/k for k states a token, None for snapshots.
      content: the parts of one page, see `hkv.layout.content`.
    """

    order: Order
    shape: Axes
    strides: Axes
    offset: int
    num_blocks: int
    split: int
    kernel_step: int
    page_size: int
    dtype: str
    tokens_per_state: int | Fraction | None
    content: tuple[Part, ...]

    def __post_init__(self) -> None:
        self.cells()

    @classmethod
    def of_spec(
        cls,
        spec: LayerSpec,
        order: Order | str,
        *,
        num_blocks: int,
        num_layers: int = 1,
        layer_stride: int | None = None,
        block_stride: int | None = None,
        offset: int = 0,
        kernel_block_size: int | None = None,
    ) -> Layout:
        """The layout of `num_layers` layers of `spec` (vLLM 0.33 `create_kv_cache_views` of one `KVCacheTensor`).

        Args:
          spec: cache description of each layer.
          order: physical order, or its name.
          num_blocks: manager blocks, the null block included.
          num_layers: layers at an even distance.
          layer_stride: bytes from one layer to the next, None to derive.
          block_stride: bytes from one manager block to the next, None to derive (then aligned as the spec asks).
          offset: byte of the first layer's block 0.
          kernel_block_size: tokens in a kernel's block, None for the manager's.

        Raises:
          LayoutError: the order cannot express the padding, alignment or split, or elements would overlap.
        """
        order = Order.parse(order)
        for name, count in (("num_blocks", num_blocks), ("num_layers", num_layers)):
            if type(count) is not int or count < 1:
                raise LayoutError(name, count, "a positive integer")
        padded = None if getattr(spec, "page_size_padded", None) is None else spec.page_size_bytes
        shape = (num_layers, num_blocks, spec.num_heads, spec.num_states, spec.content_bytes)
        if min(shape) < 1:
            raise LayoutError("block_size", spec.block_size, "at least one state and one byte in a block")
        if block_stride is None:
            block_stride = aligned_block_stride(spec, order, shape, padded)
        strides = order_strides(shape, order, padded, (layer_stride, block_stride, None, None, None))
        split = 1
        if kernel_block_size is not None and kernel_block_size != spec.block_size:
            split = check_split(spec, order, kernel_block_size, padded, strides[B])
            states = spec.states_in(kernel_block_size)
            shape = (num_layers, num_blocks * split, spec.num_heads, states, spec.content_bytes)
            strides = order_strides(shape, order, None, (strides[L], strides[B] // split, None, None, None))
        return cls(
            order=order,
            shape=shape,
            strides=strides,
            offset=offset,
            num_blocks=num_blocks,
            split=split,
            kernel_step=split,
            page_size=spec.page_size_bytes,
            dtype=getattr(spec, "dtype", "uint8"),
            tokens_per_state=getattr(spec, "tokens_per_state", None if spec.snapshot else 1),
            content=content_parts(spec, shape[N]),
        )

    def repaged(self, states: int) -> Layout:
        """The same bytes in pages of `states` states, whatever lies between two blocks.

        Only for caches that compress several tokens into a state, with one head, whose block stride the new page
        divides (vLLM 0.33 `AttentionGroup.map_kv_cache_to_kernel_blocks`). Rows between two blocks exist but are
        never named.

        Raises:
          LayoutError: the cache cannot be re-paged so.
        """
        if self.tokens_per_state is None or self.tokens_per_state <= 1 or self.shape[H] != 1 or self.split != 1:
            expected = "a cache of one head and several tokens a state that is not split yet"
            raise LayoutError("kernel states", states, expected)
        if any(part.strides is not None for part in self.content):
            raise LayoutError("kernel states", states, f"{self.shape[N]}, as parts in planes cannot be re-paged")
        page = states * self.strides[N]
        if states < 1 or self.shape[N] % states or self.strides[B] % page:
            expected = f"a divisor of {self.shape[N]} whose page divides the block stride {self.strides[B]}"
            raise LayoutError("kernel states", states, expected)
        split, step = self.shape[N] // states, self.strides[B] // page
        shape = (self.shape[L], (self.num_blocks - 1) * step + split, 1, states, self.shape[C])
        strides = (self.strides[L], page, self.strides[H], self.strides[N], 1)
        return dataclasses.replace(self, shape=shape, strides=strides, split=split, kernel_step=step)

    @property
    def num_layers(self) -> int:
        """Layers laid out."""
        return self.shape[L]

    @property
    def states_per_block(self) -> int:
        """States in one manager block."""
        return self.shape[N] * self.split

    @property
    def tokens_flatten(self) -> bool:
        """True if a layer's states, block after block, are one axis without a copy, as `[blocks * states, heads, ...]`.

        What kernels ask that take a flat cache of slots. Padding between blocks, heads outside of states, and pages of
        other layers between blocks forbid it; one block, or blocks of one state, never do.
        """
        axes = [
            (self.num_blocks, self.kernel_step * self.strides[B]),
            (self.split, self.strides[B]),
            (self.shape[N], self.strides[N]),
        ]
        told = [(extent, stride) for extent, stride in axes if extent > 1]
        return all(outer == stride * extent for (_, outer), (extent, stride) in itertools.pairwise(told))

    @property
    def end(self) -> int:
        """First byte after the last one that carries data."""
        return self.cells().end

    def cells(self) -> StridedView:
        """Every byte: `[layers, blocks, kernel blocks of a block, heads, states, content]`, uint8."""
        return self._cells

    @functools.cached_property
    def _cells(self) -> StridedView:
        shape = (self.shape[L], self.num_blocks, self.split, *self.shape[H:])
        return StridedView(shape, self._grouped_strides(*self.strides[H:]), self.offset, "uint8")

    def _grouped_strides(self, *inner: int) -> tuple[int, ...]:
        return (self.strides[L], self.strides[B] * self.kernel_step, self.strides[B], *inner)

    def layer_view(self, layer: int) -> StridedView:
        """One layer as the engine sees it: `[B, H, N, elements]` of `dtype`; K before V along the last axis."""
        item = item_bytes(self.dtype)
        if self.shape[C] % item:
            raise LayoutError("content_bytes", self.shape[C], f"a multiple of {item}, the bytes of one {self.dtype}")
        check_index("layer", layer, self.shape[L])
        shape = (*self.shape[B:C], self.shape[C] // item)
        return StridedView(shape, (*self.strides[B:C], item), self.offset + layer * self.strides[L], self.dtype)

    def part(self, name: str) -> Part:
        """The part of that name; LayoutError if it has none."""
        for part in self.content:
            if part.name == name:
                return part
        raise LayoutError("part", name, f"one of {', '.join(part.name for part in self.content)}")

    def part_view(self, name: str, layer: int) -> StridedView:
        """One part of one layer: `[B, heads, N, *shape]` of the part's own dtype.

        LayoutError where elements are not aligned, or a part that lies in planes (such as scales after all keys of a
        page) is in an order that interleaves the heads of a page.
        """
        check_index("layer", layer, self.shape[L])
        cells = self.part_cells(name)
        shape = (self.shape[B], *cells.shape[3:])
        return StridedView(shape, cells.strides[2:], cells.offset + layer * self.strides[L], cells.dtype)

    def part_cells(self, name: str) -> StridedView:
        """One part of every layer: `[layers, blocks, kernel blocks of a block, heads, states, *shape]`."""
        if name not in self._cells_of_parts:
            self._cells_of_parts[name] = self._cells_of(self.part(name))
        return self._cells_of_parts[name]

    @functools.cached_property
    def _cells_of_parts(self) -> dict[str, StridedView]:
        """Cache of `part_cells`, by part name."""
        return {}

    def _cells_of(self, part: Part) -> StridedView:
        offset, cell = self.offset + part.offset, (self.strides[H], self.strides[N])
        if part.strides is None or part.steps is not None:
            offset += part.first_head * self.strides[H]
        if part.strides is not None:
            self._check_plane(part)
            cell = part.strides
        heads = self.shape[H] if part.heads is None else part.heads
        shape = (self.shape[L], self.num_blocks, self.split, heads, self.shape[N], *part.shape)
        return StridedView(shape, self._grouped_strides(*cell, *part.element_strides), offset, part.dtype)

    def _check_plane(self, part: Part) -> None:
        rows = self.strides[N] == self.shape[C] or self.shape[N] == 1
        heads = self.strides[H] == self.shape[N] * self.shape[C] or self.shape[H] == 1 or part.steps is not None
        if not (rows and heads):
            expected = (
                f"an order that keeps a page in the order H, N, C without gaps, as {part.name} is a plane of the page"
            )
            raise LayoutError("layout", self.order.value, expected)

    def address(self, layer: int, block: int, head: int, state: int, byte: int = 0) -> int:
        """The byte at those coordinates, as `Place` has them; block 0 is addressable, nothing wraps: LayoutError."""
        check_index("head", head, self.shape[H])
        check_index("byte", byte, self.shape[C])
        return self.cells().address(*self._grouped(layer, block, head, state), byte)

    def locate(self, offset: int) -> Place | None:
        """The coordinates of a byte of the buffer; None for padding and for bytes that are not this layout's."""
        if (found := self.cells().locate(offset)) is None:
            return None
        (layer, block, piece, head, state, byte), _ = found
        return Place(layer, block, head, piece * self.shape[N] + state, byte)

    def element_address(self, part: str, layer: int, block: int, head: int, state: int, *index: int) -> int:
        """First byte of an element of a part; `head` counts the part's own heads."""
        return self.part_cells(part).address(*self._grouped(layer, block, head, state), *index)

    def locate_element(self, offset: int) -> ElementPlace | None:
        """Element that a byte of the buffer belongs to; None for padding, unused content and bytes of others."""
        for part in self.content:
            if found := self.part_cells(part.name).locate(offset):
                (layer, block, piece, head, state, *index), byte = found
                state += piece * self.shape[N]
                return ElementPlace(part.name, layer, block, head, state, tuple(index), byte)
        return None

    def _grouped(self, layer: int, block: int, head: int, state: int) -> tuple[int, int, int, int, int]:
        check_index("layer", layer, self.shape[L])
        check_index("block", block, self.num_blocks)
        check_index("state", state, self.states_per_block)
        piece, inside = divmod(state, self.shape[N])
        return layer, block, piece, head, inside

    def kernel_rows(self, block: int) -> range:
        """Kernel-block rows of a manager block."""
        check_index("block", block, self.num_blocks)
        return range(block * self.kernel_step, block * self.kernel_step + self.split)

    def states_of(self, token: int) -> range:
        """States of a manager block that hold its token `token` (0 is the block's first); LayoutError for snapshots."""
        if self.tokens_per_state is None:
            raise LayoutError("token", token, "a state: a snapshot block holds one state, not tokens")
        tokens = Fraction(self.tokens_per_state)
        check_index("token", token, math.ceil(self.states_per_block * tokens))
        first = math.floor(token / tokens)
        return range(first, first + max(1, math.floor(1 / tokens)))

    def block_runs(self, layer: int, block: int) -> tuple[tuple[int, int], ...]:
        """The bytes of one manager block of one layer, padding left out, as (first byte, bytes) in rising order.

        One run in block-compact orders; one a head in LHBNC and BHLNC, which is what copies and zeroing must visit.
        """
        start = self.address(layer, block, 0, 0)
        return tuple(StridedView((self.split, *self.shape[H:]), self.strides[B:], start, "uint8").runs())

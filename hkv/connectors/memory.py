"""A cache's memory as an engine tells a connector of it: buffers, groups, and every layer's tensors with their strides.

A tensor names its axes, one letter each, outermost first, because nothing may be guessed from a shape:

  B  rows of blocks: block b is the rows from `b * row_step` on, `rows_per_block` of them
  K  keys and values, or other planes of a layer
  H  heads,  N  tokens, or states of several,  C  elements of one of these

Several layers' tensors lie in one buffer, with the blocks of one between those of another; tensors of different groups
overlap on purpose, since a block belongs to one group at a time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from hkv.errors import LayoutError
from hkv.layout.strided import StridedView


class Range(NamedTuple):
    """Consecutive bytes of a buffer: its index, the first of them, and how many."""

    buffer: int
    first: int
    size: int


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Elements of one layer in a buffer.

    Attributes:
      name: `kv`, or `scale` for scales that lie apart.
      buffer: index of the buffer.
      offset: byte of element (0, ..., 0).
      dtype: type of the elements.
      axes: a letter for each axis, see above.
      shape: elements along each axis.
      strides: bytes between neighbours along each axis.
      rows_per_block: rows of axis B that are one block.
      row_step: rows of axis B from one block to the next.
    """

    name: str
    buffer: int
    offset: int
    dtype: str
    axes: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    rows_per_block: int = 1
    row_step: int = 1

    @classmethod
    def of_view(cls, view: StridedView, axes: str, *, name: str = "kv", buffer: int = 0, rows: int = 1, step: int = 0):
        """The tensor of a view; `rows` make up a block, and `step` of them lie between two, 0 for as many."""
        return cls(name, buffer, view.offset, view.dtype, axes, view.shape, view.strides, rows, step or rows)

    @property
    def view(self) -> StridedView:
        """The same without names."""
        return StridedView(self.shape, self.strides, self.offset, self.dtype)

    def rows(self, first: int, count: int) -> tuple[Range, ...]:
        """Bytes of so many rows of axis B, in rising order."""
        axis = self.axes.index("B")
        shape = (*self.shape[:axis], count, *self.shape[axis + 1 :])
        view = StridedView(shape, self.strides, self.offset + first * self.strides[axis], self.dtype)
        return tuple(Range(self.buffer, first, size) for first, size in view.runs())

    def block(self, block: int) -> tuple[Range, ...]:
        """Bytes of a block."""
        return self.rows(block * self.row_step, self.rows_per_block)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer: its name, the index of its group, bytes of one block of it with padding, and its tensors."""

    name: str
    group: int
    page_bytes: int
    tensors: tuple[Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers that share a block table: tokens of a block, and how many blocks there are."""

    block_tokens: int
    num_blocks: int


@dataclasses.dataclass(frozen=True)
class Memory:
    """All that a connector gets: engine, bytes of each buffer, groups and layers."""

    engine: str
    buffers: tuple[int, ...]
    groups: tuple[Group, ...]
    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        for layer in self.layers:
            for tensor in layer.tensors:
                tensor.view.check_fits(self.buffers[tensor.buffer])
        if not self.layers:
            raise LayoutError("layers", (), "at least one layer")

    def block(self, layer: int, block: int) -> tuple[Range, ...]:
        """Bytes of one block of one layer, from the tensors alone: a right connector, in one line."""
        return merged(each for tensor in self.layers[layer].tensors for each in tensor.block(block))

    def owner(self, buffer: int, byte: int, group: int) -> str:
        """Layer and block of a byte, in words, layers of a group first."""
        for layer in sorted(self.layers, key=lambda each: each.group != group):
            for tensor in layer.tensors:
                found = tensor.view.locate(byte) if tensor.buffer == buffer else None
                if found is None:
                    continue
                block, row = divmod(found[0][tensor.axes.index("B")], tensor.row_step)
                if row < tensor.rows_per_block:
                    return f"block {block} of layer {layer.name}" + (", scales" if tensor.name == "scale" else "")
        return "padding" if 0 <= byte < self.buffers[buffer] else "no byte of the buffer"

    @functools.cached_property
    def record(self) -> dict[str, object]:
        """The same as plain values."""
        return dataclasses.asdict(self)


def merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Ranges in rising order, those that adjoin made one; ranges that overlap stay apart."""
    found: list[Range] = []
    for each in sorted(ranges):
        if found and found[-1].buffer == each.buffer and found[-1].first + found[-1].size == each.first:
            found[-1] = Range(each.buffer, found[-1].first, found[-1].size + each.size)
        else:
            found.append(each)
    return tuple(found)


def without(ranges: Iterable[Range], others: Iterable[Range]) -> Iterator[Range]:
    """Bytes of some ranges that are in none of the others."""
    taken = sorted(others)
    for buffer, first, size in sorted(ranges):
        end = first + size
        for _, start, length in (each for each in taken if each.buffer == buffer):
            if start + length <= first or start >= end:
                continue
            if start > first:
                yield Range(buffer, first, start - first)
            first = max(first, start + length)
        if first < end:
            yield Range(buffer, first, end - first)

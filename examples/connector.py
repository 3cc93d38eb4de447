"""A connector that registers memory group by group, and holds its ranges of bytes to HKV's plan.

  hkv check-connector examples/connector.py:block_ranges      every form of memory
  hkv check-connector examples/connector.py:only_group_0      a mistake, named in the first line

It registers one entry for each run of a block: where the run of block 0 begins, how far the next block's is, and how
long it is. `only_group_0` has what connectors for hybrid models have got wrong: one size, group 0's, for all groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple


class Registered(NamedTuple):
    """One run of bytes of every block of a layer. Bytes, but for the buffer's index."""

    buffer: int
    first: int
    distance: int
    size: int


def register(layer: Any) -> list[Registered]:
    """The entries of a layer: of all its tensors, for keys and values, heads and kernel blocks that lie apart."""
    return [entry for tensor in layer.tensors for entry in _entries(tensor)]


def _entries(tensor: Any) -> Iterator[Registered]:
    axis = tensor.axes.index("B")
    shape = [*tensor.shape[:axis], tensor.rows_per_block, *tensor.shape[axis + 1 :]]
    axes = sorted((stride, extent) for stride, extent in zip(tensor.strides, shape, strict=True) if extent > 1)
    size = tensor.view.itemsize
    while axes and axes[0][0] == size:  # the next axis continues the run
        size *= axes.pop(0)[1]
    for steps in itertools.product(*([stride * index for index in range(extent)] for stride, extent in axes)):
        distance = tensor.row_step * tensor.strides[axis]
        yield Registered(tensor.buffer, tensor.offset + sum(steps), distance, size)


def block_ranges(memory: Any, layer: int, block: int) -> list[tuple[int, int, int]]:
    """The bytes of one block of one layer: buffer, first byte and number of bytes of each range."""
    return [(e.buffer, e.first + block * e.distance, e.size) for e in register(memory.layers[layer])]


def only_group_0(memory: Any, layer: int, block: int) -> list[tuple[int, int, int]]:
    """The same with the sizes of group 0 registered for every group."""
    first = next(each for each in memory.layers if each.group == 0)
    size = sum(entry.size for entry in register(first))
    if memory.layers[layer].group == 0:
        return block_ranges(memory, layer, block)
    entry = register(memory.layers[layer])[0]
    return [(entry.buffer, entry.first + block * entry.distance, size)]

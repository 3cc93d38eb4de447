"""Mistakes that connectors are known to make, each as a wrong connector: what answers like one is told by its name.

Each computes ranges from the tensors but overlooks one thing: that groups have blocks of different
sizes (the size of group 0 was registered for all), that blocks of other layers lie between two blocks, that a row may
be a kernel block, that heads or keys and values lie apart. Where a block is moved as one of them says it would be, in
every answer of a case that is wrong, that is the mistake. What none of them explains is told by whose the bytes are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from hkv.connectors.memory import Memory, Range, Tensor, merged
from hkv.errors import HKVError
from hkv.layout.strided import StridedView

Ranges = tuple[Range, ...]
Answer = tuple[int, int, Ranges]
"""A layer and a block, by index, and the ranges that a connector gave for it."""


def named(memory: Memory, wrong: Sequence[Answer]) -> tuple[str, ...]:
    """The mistakes that explain every wrong answer about a memory, likelier ones first."""
    return tuple(
        text
        for text, connector in MISTAKES
        if all(_same(connector, memory, layer, block, given) for layer, block, given in wrong)
    )


def told(memory: Memory, layer: int, missing: Sequence[Range], extra: Sequence[Range]) -> str:
    """A wrong answer in words: whose bytes it has too many, and whose are missing."""
    group = memory.layers[layer].group
    parts = []
    if missing:
        buffer, first, _ = missing[0]
        parts.append(f"{_count(missing)} left out, the first of them {memory.owner(buffer, first, group)}")
    if extra:
        buffer, first, _ = extra[0]
        parts.append(f"{_count(extra)} too many, the first of them {memory.owner(buffer, first, group)}")
    return ", and ".join(parts)


def _count(ranges: Iterable[Range]) -> str:
    total = sum(each.size for each in ranges)
    return f"{total:,} byte{'s' if total != 1 else ''}"


def _same(connector: Connector, memory: Memory, layer: int, block: int, given: Ranges) -> bool:
    try:
        found = merged(connector(memory, layer, block))
    except (HKVError, ValueError, IndexError):
        return False  # not a mistake that can be made about this memory
    return bool(found) and found == merged(given)


# The wrong connectors, likelier ones first where two of them answer alike.

Connector = Callable[[Memory, int, int], Iterable[Range]]


def _starts(memory: Memory, layer: int, block: int) -> list[tuple[Tensor, int]]:
    """Each tensor of a layer, and the first byte of a block in it."""
    tensors = memory.layers[layer].tensors
    return [(tensor, tensor.block(block)[0].first) for tensor in tensors]


def _sized(memory: Memory, layer: int, block: int, size: int) -> Ranges:
    return tuple(Range(tensor.buffer, first, size) for tensor, first in _starts(memory, layer, block))


def _size_of_group_0(memory: Memory, layer: int, block: int) -> Ranges:
    first = next(each for each in memory.layers if each.group == 0)
    return _sized(memory, layer, block, sum(each.size for each in first.tensors[0].block(0)))


def _page_of_group_0(memory: Memory, layer: int, block: int) -> Ranges:
    return _sized(memory, layer, block, next(each for each in memory.layers if each.group == 0).page_bytes)


def _pitch(memory: Memory, layer: int, block: int, page: Callable[[Tensor, int], int]) -> Ranges:
    """Blocks at the distance of `page` bytes from the layer's first."""
    found = []
    for tensor in memory.layers[layer].tensors:
        origin = tensor.block(0)[0].first
        found += [Range(each.buffer, each.first + block * page(tensor, origin), each.size) for each in tensor.block(0)]
    return tuple(found)


def _dense(memory: Memory, layer: int, block: int) -> Ranges:
    return _pitch(memory, layer, block, lambda tensor, _: sum(each.size for each in tensor.block(0)))


def _dense_pages(memory: Memory, layer: int, block: int) -> Ranges:
    return _pitch(memory, layer, block, lambda *_: memory.layers[layer].page_bytes)


def _pitch_of_group_0(memory: Memory, layer: int, block: int) -> Ranges:
    first = next(each for each in memory.layers if each.group == 0)
    pitch = first.tensors[0].view.strides[first.tensors[0].axes.index("B")] * first.tensors[0].row_step
    return _pitch(memory, layer, block, lambda *_: pitch)


def _rows(count: Callable[[Tensor], int], first: Callable[[Tensor, int], int]) -> Connector:
    def connector(memory: Memory, layer: int, block: int) -> Iterable[Range]:
        tensors = memory.layers[layer].tensors
        return [each for tensor in tensors for each in tensor.rows(first(tensor, block), count(tensor))]

    return connector


def _one_run(memory: Memory, layer: int, block: int) -> Iterable[Range]:
    for tensor, first in _starts(memory, layer, block):
        yield Range(tensor.buffer, first, sum(each.size for each in tensor.block(block)))


def _changed(change: Callable[[Tensor], Tensor]) -> Connector:
    def connector(memory: Memory, layer: int, block: int) -> Iterable[Range]:
        return [each for tensor in memory.layers[layer].tensors for each in change(tensor).block(block)]

    return connector


def _elements(memory: Memory, layer: int, block: int) -> Iterable[Range]:
    for tensor in memory.layers[layer].tensors:
        item = tensor.view.itemsize
        if item == 1:
            raise ValueError("elements are bytes")
        yield from (Range(buffer, first // item, size // item) for buffer, first, size in tensor.block(block))


def _block_stride_in_elements(memory: Memory, layer: int, block: int) -> Iterable[Range]:
    for tensor in memory.layers[layer].tensors:
        item, stride = tensor.view.itemsize, tensor.strides[tensor.axes.index("B")] * tensor.row_step
        if item == 1:
            raise ValueError("elements are bytes")
        yield from (Range(at, first + block * (stride // item), size) for at, first, size in tensor.block(0))


def _along(axis_of: Callable[[Tensor], int]) -> Connector:
    """Blocks counted along an axis that is not theirs."""

    def connector(memory: Memory, layer: int, block: int) -> Iterable[Range]:
        for tensor in memory.layers[layer].tensors:
            axis = axis_of(tensor)
            rest = [at for at in range(len(tensor.shape)) if at != axis]
            shape, strides = (tuple(values[at] for at in rest) for values in (tensor.shape, tensor.strides))
            offset = tensor.offset + block * tensor.strides[axis]
            runs = StridedView(shape, strides, offset, tensor.dtype).runs()
            yield from (Range(tensor.buffer, first, size) for first, size in runs)

    return connector


def _first_axis(tensor: Tensor) -> int:
    if tensor.axes[0] == "B":
        raise ValueError("the first axis is the blocks'")
    return 0


def _behind_two(tensor: Tensor) -> int:
    """The axis behind one of two elements that is not keys and values."""
    axis = tensor.shape.index(2)
    if tensor.axes[axis] == "K" or axis + 1 == len(tensor.shape):
        raise ValueError("two are keys and values")
    return axis + 1


def _keys(memory: Memory, layer: int, block: int) -> Iterable[Range]:
    found = memory.block(layer, block)
    if len(found) > 1:
        return found[: len(found) // 2]
    return [Range(buffer, first, size // 2) for buffer, first, size in found]


def _without_scales(memory: Memory, layer: int, block: int) -> Iterable[Range]:
    if len(memory.layers[layer].tensors) == 1:
        raise ValueError("no scales lie apart")
    return memory.layers[layer].tensors[0].block(block)


def _cut(signed: bool) -> Connector:
    def connector(memory: Memory, layer: int, block: int) -> Iterable[Range]:
        half = 1 << 31 if signed else 0
        return [
            Range(buffer, (first + half) % (1 << 32) - half, size) for buffer, first, size in memory.block(layer, block)
        ]

    return connector


def _up_to_next(memory: Memory, layer: int, block: int) -> Iterable[Range]:
    for tensor, first in _starts(memory, layer, block):
        yield Range(tensor.buffer, first, tensor.strides[tensor.axes.index("B")] * tensor.row_step)


def _all_layers(memory: Memory, layer: int, block: int) -> Iterable[Range]:
    layers = [index for index, each in enumerate(memory.layers) if each.group == memory.layers[layer].group]
    runs = [each for index in layers for each in memory.block(index, block)]
    return list(dict.fromkeys(each for each in runs if each.buffer == runs[0].buffer))


def _other_layer(step: int) -> Connector:
    def connector(memory: Memory, layer: int, block: int) -> Iterable[Range]:
        group = memory.layers[layer].group
        members = [index for index, each in enumerate(memory.layers) if each.group == group]
        at = members.index(layer) + step
        if not 0 <= at < len(members):
            raise ValueError("no such layer")
        return memory.block(members[at], block)

    return connector


def _first_layer(memory: Memory, layer: int, block: int) -> Iterable[Range]:
    return memory.block(0, block)


def _buffer_0(memory: Memory, layer: int, block: int) -> Iterable[Range]:
    return [Range(0, first, size) for _, first, size in memory.block(layer, block)]


MISTAKES: tuple[tuple[str, Connector], ...] = (
    ("group 0's size of a block is used for every group", _size_of_group_0),
    ("group 0's size of a block is used for every group, padding included", _page_of_group_0),
    ("group 0's distance between blocks is used for every group", _pitch_of_group_0),
    ("a block's number is taken for a kernel block's", _rows(lambda t: 1, lambda t, block: block)),
    (
        "a block begins at the row of its number, and has all its rows",
        _rows(lambda t: t.rows_per_block, lambda t, b: b),
    ),
    ("only the first kernel block of a block is moved", _rows(lambda t: 1, lambda t, block: block * t.row_step)),
    ("the axis after one of two elements is taken for the blocks', those two for keys and values", _along(_behind_two)),
    ("the first axis is taken for the blocks'", _along(_first_axis)),
    ("blocks are taken to lie as close as their data: what lies between two is overlooked", _dense),
    (
        "blocks are taken to lie as close as their pages: blocks of other layers between them are overlooked",
        _dense_pages,
    ),
    ("a block is taken for one run, though its heads, or keys and values, lie apart", _one_run),
    ("the block before is moved", lambda memory, layer, block: memory.block(layer, block - 1)),
    ("the block after is moved", lambda memory, layer, block: memory.block(layer, block + 1)),
    ("the layer's offset in its buffer is left out", _changed(lambda t: dataclasses.replace(t, offset=0))),
    ("the distance between blocks is counted in elements, not bytes", _block_stride_in_elements),
    ("everything is counted in elements, not bytes", _elements),
    ("scales that lie apart are left out", _without_scales),
    ("only the first half is moved: keys without values", _keys),
    ("addresses are cut to 32 bits", _cut(signed=False)),
    ("addresses are cut to 32 bits with a sign", _cut(signed=True)),
    ("everything up to the next block is moved, blocks of other layers with it", _up_to_next),
    ("all layers of the group are moved with each", _all_layers),
    ("the group's next layer is moved", _other_layer(1)),
    ("the group's layer before is moved", _other_layer(-1)),
    ("the first layer is moved in place of every other", _first_layer),
    ("buffer 0 is taken for every layer's", _buffer_0),
)
"""Mistakes by what a wrong connector overlooks, and the connector."""

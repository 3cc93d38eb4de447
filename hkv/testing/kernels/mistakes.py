"""Mistakes that kernels make, each as the bytes that a kernel with it would leave: so a failure gets its name.

A mistake is a change of a plan (`hkv.testing.kernels.plans`), such as two strides exchanged. What the changed plan
would leave is compared with what the kernel left, over all of memory; a mistake that explains every byte names the
failure. They come in the order in which they are told, where several explain the same.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from hkv.layout.views.numpy import numpy_dtype
from hkv.testing.kernels.call import Call
from hkv.testing.kernels.cases import MOVING
from hkv.testing.kernels.placement import SCALED
from hkv.testing.kernels.plans import Changes, MovePlan, Side, explains, left_by, plan_of
from hkv.testing.kernels.stride_mistakes import stride_mistakes
from reference.paged.quantization import quantize_per_tensor

BY_TABLE = frozenset({"scatter", "gather", "copy_blocks", "zero"})


def explanations(call: Call, got: Changes) -> list[str]:
    """Names of the mistakes that explain every byte that a kernel changed, most telling first."""
    return list(dict.fromkeys(name for name, left in predictions(call) if explains(left, got, call)))


def predictions(call: Call) -> Iterator[tuple[str, Changes]]:
    """Every mistake of a case's operation by name, and what it leaves."""
    operation = call.case.operation
    if operation not in MOVING:
        return
    plan = plan_of(call)
    for operations, changes in MISTAKES:
        if operation in operations:
            for name, changed in changes(plan, call):
                yield name, left_by(changed, call)


MISTAKES: list[tuple[frozenset[str], Callable[[MovePlan, Call], Iterator[tuple[str, MovePlan]]]]] = []


def _mistake(name: str, operations: frozenset[str] = MOVING) -> Callable[..., Any]:
    def made(change: Callable[[MovePlan, Call], Iterator[MovePlan]]) -> Any:
        MISTAKES.append((operations, lambda plan, call: ((name, changed) for changed in change(plan, call))))
        return change

    return made


@_mistake("nothing is written at all (was a copy changed?)")
def _nothing(plan: MovePlan, call: Call) -> Iterator[MovePlan]:
    yield plan.but(live=np.zeros_like(plan.live))


# Ids.


@_mistake("padding tokens or blocks (-1) are not left out")
def _padding(plan: MovePlan, call: Call) -> Iterator[MovePlan]:
    case = call.case
    rows, kernel_size = case.blocks * case.pieces, case.block_size // case.pieces
    padding = plan.row == -1 * case.pieces
    if call.case.operation == "write":
        for row, slot in ((rows - 1, kernel_size - 1), (0, -1), (-1, kernel_size - 1), (0, 0)):
            yield plan.but(
                live=plan.live | padding, row=np.where(padding, row, plan.row), slot=np.where(padding, slot, plan.slot)
            )
        return
    inner = np.tile(np.arange(case.block_size), len(plan.row) // case.block_size) // kernel_size
    for first in (rows - case.pieces, -case.pieces, 0):
        reads = plan.read_row
        if reads is not None:
            reads = np.where(reads < 0, first + inner, reads)
        yield plan.but(live=plan.live | padding, row=np.where(padding, first + inner, plan.row), read_row=reads)


@_mistake("the null block is taken for a block", frozenset({"scatter", "gather"}))
def _null(plan: MovePlan, call: Call) -> Iterator[MovePlan]:
    case = call.case
    yield plan.but(live=plan.live | ((plan.row >= 0) & (plan.row < case.pieces)))


@_mistake("slot 0 is taken for padding", frozenset({"write"}))
def _first_slot(plan: MovePlan, call: Call) -> Iterator[MovePlan]:
    yield plan.only(np.array(call.case.slots, np.int64) > 0)


@_mistake("block 0 is taken for padding, or for the null block, which writers do write", frozenset({"write"}))
def _first_block(plan: MovePlan, call: Call) -> Iterator[MovePlan]:
    for pieces in {1, call.case.pieces}:
        yield plan.only(np.array(call.case.slots, np.int64) >= call.case.block_size // pieces)


@_mistake("ids of manager blocks are taken for kernel blocks")
def _unexpanded(plan: MovePlan, call: Call) -> Iterator[MovePlan]:
    pieces = call.case.pieces
    if pieces == 1:
        return
    for spread in (1, 0):
        change = {"row": plan.row // pieces + spread * (plan.row % pieces)}
        if plan.read_row is not None:
            change["read_row"] = plan.read_row // pieces + spread * (plan.read_row % pieces)
        yield plan.but(**change)
    if call.case.operation in BY_TABLE and call.case.operation != "gather":
        yield plan.but(row=plan.row // pieces, live=plan.live & (plan.row % pieces == 0))


@_mistake("ids of kernel blocks are expanded twice")
def _expanded_twice(plan: MovePlan, call: Call) -> Iterator[MovePlan]:
    pieces = call.case.pieces
    if pieces > 1:
        yield plan.but(row=plan.row // pieces * pieces * pieces + plan.row % pieces)
        yield plan.but(row=plan.row * pieces)


@_mistake("the manager's block size is used with kernel blocks", frozenset({"write"}))
def _manager_size(plan: MovePlan, call: Call) -> Iterator[MovePlan]:
    case = call.case
    if case.pieces > 1:
        slots = np.array(case.slots, np.int64)
        yield plan.but(row=slots // case.block_size, slot=slots % case.block_size)


@_mistake("the block size is read from another axis (heads or elements)", frozenset({"write"}))
def _wrong_size(plan: MovePlan, call: Call) -> Iterator[MovePlan]:
    slots = np.array(call.case.slots, np.int64)
    for size in {call.case.heads, call.case.key_size, call.case.blocks * call.case.pieces}:
        yield plan.but(row=slots // size, slot=slots % size)


@_mistake(
    "slot ids are not divided by the block size: they are taken for blocks, or for a block's slots",
    frozenset({"write"}),
)
def _undivided(plan: MovePlan, call: Call) -> Iterator[MovePlan]:
    slots = np.array(call.case.slots, np.int64)
    zero = np.zeros_like(slots)
    for row, slot in ((slots, zero), (slots, plan.slot), (plan.row, slots), (zero, slots)):
        yield plan.but(row=row, slot=slot)


@_mistake("slot ids, which are int64, are read as int32", frozenset({"write"}))
def _words(plan: MovePlan, call: Call) -> Iterator[MovePlan]:
    slots = np.array(call.case.slots, "<i8").view("<i4")[: len(plan.row)].astype(int)
    size = call.case.block_size // call.case.pieces
    yield plan.but(row=slots // size, slot=slots % size, live=slots >= 0)


@_mistake("slots or blocks are off by one")
def _off_by_one(plan: MovePlan, call: Call) -> Iterator[MovePlan]:
    kernel_size = call.case.block_size // call.case.pieces
    for step in (1, -1):
        flat = plan.row * kernel_size + plan.slot + step
        yield plan.but(row=flat // kernel_size, slot=flat % kernel_size)
        yield plan.but(slot=plan.slot + step)
        yield plan.but(row=plan.row + step * call.case.pieces)
        yield plan.but(slot=(plan.slot + step) % kernel_size)


@_mistake("an address is computed in 32 bits")
def _narrow(plan: MovePlan, call: Call) -> Iterator[MovePlan]:
    for elements in (True, False):
        yield plan.but(narrow="elements" if elements else "bytes")


@_mistake("another layer is read or written", frozenset({"write", "scatter", "gather"}))
def _layer(plan: MovePlan, call: Call) -> Iterator[MovePlan]:
    for layer in range(call.case.layers):
        yield plan.but(layer=np.full_like(plan.layer, layer))


MISTAKES.append((MOVING, stride_mistakes))


# What is moved.


@_mistake("keys and values are exchanged")
def _exchanged(plan: MovePlan, call: Call) -> Iterator[MovePlan]:
    sides = plan.sides
    for first, second in (("key", "value"), ("key_scale", "value_scale")):
        if first in sides and second in sides and sides[first].size == sides[second].size:
            kept = ("content", "places")
            one, other = ({name: getattr(sides[side], name) for name in kept} for side in (second, first))
            yield plan.but(
                sides=sides
                | {first: dataclasses.replace(sides[first], **one), second: dataclasses.replace(sides[second], **other)}
            )


@_mistake("keys are taken for values too, or values for keys", frozenset({"write", "scatter", "gather"}))
def _twice(plan: MovePlan, call: Call) -> Iterator[MovePlan]:
    if not {"key", "value"} <= set(plan.sides) or plan.sides["key"].size != plan.sides["value"].size:
        return
    key, value = plan.sides["key"], plan.sides["value"]
    for one, other in ((key, value), (value, key)):
        copy = dataclasses.replace(other, content=one.content)  # one is written to both
        if one.content is None:  # or both are read from one
            copy = dataclasses.replace(one, places=other.places)
        sides = {"key": key, "value": copy} if one is key else {"key": copy, "value": value}
        yield plan.but(sides=plan.sides | sides)
        if one.content is not None:  # both are written to one, this or that first
            yield plan.but(sides=plan.sides | {"key": one, "value": dataclasses.replace(one, content=other.content)})
            yield plan.but(sides=plan.sides | {"key": dataclasses.replace(one, content=other.content), "value": one})


@_mistake("only some parts are moved (keys, values or scales are left)")
def _some_parts(plan: MovePlan, call: Call) -> Iterator[MovePlan]:
    names = list(plan.sides)
    for subset in range(1, 2 ** len(names) - 1):
        chosen = [name for bit, name in enumerate(names) if subset >> bit & 1]
        yield plan.but(sides={name: plan.sides[name] for name in chosen})


@_mistake("the last tokens or blocks are left out (a tail that does not fill a vector or a chunk)")
def _tail(plan: MovePlan, call: Call) -> Iterator[MovePlan]:
    unit = 1 if call.case.operation == "write" else call.case.block_size
    count = int(plan.source.max(initial=-1)) // unit + 1
    for kept in sorted({count - 1, 1, *(count // n * n for n in (2, 4))}):
        yield plan.only(plan.source < kept * unit)
    yield plan.only(plan.source >= unit)


@_mistake("only a part of each block is moved (its first or last kernel blocks or slots)")
def _part_of_block(plan: MovePlan, call: Call) -> Iterator[MovePlan]:
    case = call.case
    size = case.block_size // case.pieces
    state = plan.source % case.block_size if case.operation in BY_TABLE else plan.row % case.pieces * size + plan.slot
    for inside, count in ((state, case.block_size), (plan.slot, size)):
        for kept in range(1, count):
            yield plan.only(inside < kept)
            yield plan.only(inside >= kept)


@_mistake("only some layers are moved", frozenset({"copy_blocks", "zero"}))
def _some_layers(plan: MovePlan, call: Call) -> Iterator[MovePlan]:
    for kept in range(1, call.case.layers):
        yield plan.only(plan.layer < kept)


@_mistake("heads are mixed up or left out")
def _heads(plan: MovePlan, call: Call) -> Iterator[MovePlan]:
    heads = call.case.heads
    if heads > 1:
        for kept in range(1, heads):
            yield plan.sided(lambda side, kept=kept: _first(side, "heads", min(kept, side.heads)))
        orders = [
            np.zeros(heads, int),
            np.arange(heads)[::-1],
            np.roll(np.arange(heads), 1),
            np.roll(np.arange(heads), -1),
        ]
        for order in orders:
            yield plan.sided(functools.partial(_reordered, axis=1, order=order))


@_mistake("the tail of each head is left out (elements that do not fill a vector)")
def _elements(plan: MovePlan, call: Call) -> Iterator[MovePlan]:
    for unit in (2, 4, 8, 16):
        yield plan.sided(lambda side, unit=unit: _first(side, "size", side.size // unit * unit))
    yield plan.sided(lambda side: _first(side, "size", side.size - 1))
    yield plan.sided(lambda side: _reordered(side, 2, np.arange(side.size)[::-1]))


def _first(side: Side, axis: str, kept: int) -> Mapping[str, Any]:
    """The first heads or elements of a part."""
    cut = (slice(None), slice(kept)) if axis == "heads" else (slice(None), slice(None), slice(kept))
    both = {name: getattr(side, name) for name in ("content", "places")}
    return {axis: kept} | {name: None if array is None else array[cut] for name, array in both.items()}


def _reordered(side: Side, axis: int, order: np.ndarray) -> Mapping[str, Any]:
    both = {name: getattr(side, name) for name in ("content", "places")}
    return {
        name: None if a is None or a.shape[axis] != len(order) else np.take(a, order, axis) for name, a in both.items()
    }


@_mistake("tokens are mixed up")
def _tokens(plan: MovePlan, call: Call) -> Iterator[MovePlan]:
    count = int(plan.source.max(initial=-1)) + 1
    for order in (
        np.arange(count)[::-1],
        np.zeros(count, int),
        np.roll(np.arange(count), 1),
        np.roll(np.arange(count), -1),
    ):
        yield plan.but(source=order[plan.source])


@_mistake("a scale is lost, inverted or taken from the other side", frozenset({"write"}))
def _scales(plan: MovePlan, call: Call) -> Iterator[MovePlan]:
    case = call.case
    if not case.source_dtype or case.content == SCALED:
        return
    key, value = case.scales
    dtype = numpy_dtype(case.dtype)
    for pair in ((1.0, 1.0), (1 / key, 1 / value), (key, key), (value, value), (value, key), (key, 1.0), (1.0, value)):
        sides = {}
        for name, side in plan.sides.items():
            raw = call.raw[name]
            content = quantize_per_tensor(raw, pair[name == "value"], dtype).view(np.uint8)
            sides[name] = dataclasses.replace(side, content=content.reshape(*raw.shape, 1))
        yield plan.but(sides=sides)


@_mistake("sources and targets are exchanged", frozenset({"copy_blocks"}))
def _reversed(plan: MovePlan, call: Call) -> Iterator[MovePlan]:
    yield plan.but(row=plan.read_row, read_row=plan.row)


@_mistake("blocks are copied one after the other, over what is still to be read", frozenset({"copy_blocks"}))
def _one_by_one(plan: MovePlan, call: Call) -> Iterator[MovePlan]:
    yield plan.but(one_by_one=True)


@_mistake("block ids are taken for slots", BY_TABLE)
def _ids_as_slots(plan: MovePlan, call: Call) -> Iterator[MovePlan]:
    kernel_size = call.case.block_size // call.case.pieces
    first = plan.source % call.case.block_size == 0
    change = {"row": plan.row // call.case.pieces // kernel_size, "slot": plan.row // call.case.pieces % kernel_size}
    if plan.read_row is None:
        yield plan.only(first).but(**change)
        return
    yield plan.only(first).but(
        row=change["row"], slot=change["slot"], read_row=plan.read_row // call.case.pieces // kernel_size,
        read_slot=plan.read_row // call.case.pieces % kernel_size,
    )  # fmt: skip

"""Plans of paged operations: which row of which slot goes where, as arrays that a mistake can change.

A plan is how kernels compute addresses: an offset, a stride for each axis, and for each slot a row of the cache. The
bytes that it leaves are told without touching a pool. It is not believed: a test holds it to the reference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hkv.layout.strided import StridedView
from hkv.testing.kernels.call import Call

Changes = tuple[np.ndarray, np.ndarray]
"""Addresses of bytes that changed, rising, and what they are then."""

VALUED = frozenset({"write", "scatter"})
"""Operations that are given new content."""


@dataclasses.dataclass(frozen=True)
class Side:
    """One part: strides of the pool in bytes, and content or places of what is moved, by row.

    `content` is uint8 `[rows, heads, elements, bytes]`, `places` addresses `[rows, heads, elements]`; one is None.
    """

    offset: int
    layer: int
    row: int
    head: int
    slot: int
    element: int
    heads: int
    size: int
    item: int
    content: np.ndarray | None = None
    places: np.ndarray | None = None

    @property
    def steps(self) -> tuple[int, ...]:
        """Offset and strides."""
        return self.offset, self.layer, self.row, self.head, self.slot, self.element


@dataclasses.dataclass(frozen=True)
class MovePlan:
    """Moves of an operation: one entry of each array for each slot that is moved, layer by layer.

      `source` is the row of content or places; a copy has rows that it reads from. What is not `live` moves nothing, or
    gathers zeros; what is `skipped` is not even gathered.
    """

    sides: dict[str, Side]
    layer: np.ndarray
    row: np.ndarray
    slot: np.ndarray
    live: np.ndarray
    source: np.ndarray
    read_row: np.ndarray | None = None
    read_slot: np.ndarray | None = None
    skipped: np.ndarray | None = None
    one_by_one: bool = False
    narrow: str = ""

    def sided(self, change: Callable[[Side], Mapping[str, Any]]) -> MovePlan:
        """The plan with a change of every part."""
        return self.but(sides={name: dataclasses.replace(side, **change(side)) for name, side in self.sides.items()})

    def one(self, part: str, **changes: Any) -> MovePlan:
        """The plan with a change of one part."""
        return self.but(sides=self.sides | {part: dataclasses.replace(self.sides[part], **changes)})

    def only(self, kept: np.ndarray) -> MovePlan:
        """The plan without some entries."""
        return self.but(live=self.live & kept, skipped=~kept)

    def but(self, **changes: Any) -> MovePlan:
        """The plan with other arrays."""
        return dataclasses.replace(self, **changes)


def plan_of(call: Call) -> MovePlan:
    """The plan of a case that is moved as it should be."""
    case, placement = call.case, call.placement
    layers = [case.layer] if case.operation in ("write", "scatter", "gather") else list(range(case.layers))
    if case.operation == "write":
        slots = np.array(case.slots, np.int64)
        block, state = (
            np.where(slots < 0, slots, slots // case.block_size),
            np.where(slots < 0, 0, slots % case.block_size),
        )
    else:
        ids = case.targets if case.operation == "copy_blocks" else case.table
        block = np.repeat(np.array(ids, np.int64), case.block_size)
        state = np.tile(np.arange(case.block_size), len(ids))
    read = np.repeat(np.array(case.table, np.int64), case.block_size) if case.operation == "copy_blocks" else None
    kernel_size = case.block_size // case.pieces

    def rows(blocks: np.ndarray) -> np.ndarray:
        return blocks * case.pieces + np.where(blocks >= 0, state // kernel_size, 0)

    live = (block >= 0) & (block < case.blocks)
    if case.operation in ("scatter", "gather"):
        live &= block != 0
    if read is not None:
        live &= (read >= 0) & (read < case.blocks)
    count = len(block)
    every: dict[str, Any] = {
        name: np.tile(array, len(layers)) for name, array in (("row", rows(block)), ("slot", state % kernel_size))
    }
    sides = {part.name: _side(call, part.name, placement.rows_view(part.name, None)) for part in placement.content}
    return MovePlan(
        sides=sides,
        layer=np.repeat(layers, count),
        live=np.tile(live, len(layers)),
        source=np.tile(np.arange(count), len(layers)),
        read_row=None if read is None else np.tile(rows(read), len(layers)),
        **every,
    )


def _side(call: Call, name: str, found: StridedView) -> Side:
    content: np.ndarray | None = None
    places: np.ndarray | None = None
    heads, size = found.shape[2], found.shape[4]
    if call.case.operation in VALUED:
        values = np.ascontiguousarray(call.values[name])
        content = values.view(np.uint8).reshape(*values.shape, values.itemsize)
    elif name in call.outputs:
        out = call.outputs[name]
        rows, columns, elements = (np.arange(n) * stride for n, stride in zip(out.shape, out.strides, strict=True))
        places = out.offset + rows[:, None, None] + columns[:, None] + elements
    layer, row, head, slot, element = found.strides
    offset = found.offset + call.pool
    return Side(offset, layer, row, head, slot, element, heads, size, found.itemsize, content, places)


def left_by(plan: MovePlan, call: Call) -> Changes:
    """Bytes that a kernel changes which does as the plan says; where several move to one place, the last counts."""
    if plan.one_by_one:
        return _left_one_by_one(plan, call)
    addresses, values = [], []
    for side in plan.sides.values():
        here = _addresses(side, plan.layer, plan.row, plan.slot)
        if plan.narrow:
            item = side.item if plan.narrow == "elements" else 1
            here = (
                side.offset
                + ((here - side.offset) // item).astype(np.int32).astype(np.int64) * item
                + ((here - side.offset) % item)
            )
        if side.places is not None:
            moved = np.where(plan.live[:, None, None, None], read_bytes(call, here), 0)
            here, live = (
                side.places[plan.source][..., None] + np.arange(side.item),
                np.ones_like(plan.live) if plan.skipped is None else ~plan.skipped,
            )
        elif side.content is not None:
            moved, live = np.broadcast_to(side.content[plan.source], here.shape), plan.live
        elif plan.read_row is not None:
            slot = plan.slot if plan.read_slot is None else plan.read_slot
            moved, live = read_bytes(call, _addresses(side, plan.layer, plan.read_row, slot)), plan.live
        else:
            moved, live = np.zeros(here.shape, np.uint8), plan.live
        addresses.append(here[live].ravel())
        values.append(moved[live].ravel())
    return only_changes(call, np.concatenate(addresses), np.concatenate(values))


def _left_one_by_one(plan: MovePlan, call: Call) -> Changes:
    """As `left_by`, of copies of which each sees what those before it wrote."""
    held: dict[int, int] = {}
    per_pair = call.case.block_size
    order = np.argsort(plan.source // per_pair, kind="stable")
    for pair in np.split(order, range(per_pair * call.case.layers, len(order), per_pair * call.case.layers)):
        part = plan.but(
            one_by_one=False,
            **{name: getattr(plan, name)[pair] for name in ("layer", "row", "slot", "live", "source", "read_row")},
        )
        moved: dict[int, int] = {}
        for side in part.sides.values():
            here, read = (_addresses(side, part.layer, rows, part.slot) for rows in (part.row, part.read_row))
            was = read_bytes(call, read)
            for to, source, value in zip(here[part.live].flat, read[part.live].flat, was[part.live].flat, strict=True):
                moved[int(to)] = held.get(int(source), int(value))
        held |= moved
    return only_changes(call, np.array(list(held), np.int64), np.array(list(held.values()), np.uint8))


def _addresses(side: Side, layer: np.ndarray, row: np.ndarray | None, slot: np.ndarray) -> np.ndarray:
    """Addresses `[rows, heads, elements, bytes]`."""
    assert row is not None
    first = side.offset + layer * side.layer + row * side.row + slot * side.slot
    heads, elements = np.arange(side.heads) * side.head, np.arange(side.size) * side.element
    return first[:, None, None, None] + heads[:, None, None] + elements[:, None] + np.arange(side.item)


def read_bytes(call: Call, addresses: np.ndarray) -> np.ndarray:
    """Bytes before the kernel ran; what lies outside of memory is zero."""
    inside = (addresses >= 0) & (addresses < call.memory.size)
    return np.where(inside, call.before.read(np.where(inside, addresses, 0).ravel()).reshape(addresses.shape), 0)


def only_changes(call: Call, addresses: np.ndarray, values: np.ndarray) -> Changes:
    """Those of some written bytes that were not so before, each once; what lies outside of memory is left out."""
    inside = (addresses >= 0) & (addresses < call.memory.size)
    addresses, values = addresses[inside], values[inside]
    found, last = np.unique(addresses[::-1], return_index=True)
    values = values[::-1][last]
    new = values != call.before.read(found)
    return found[new], values[new]


def explains(left: Changes, got: Changes, call: Call) -> bool:
    """True if a mistake that leaves these bytes explains all that changed.

    Bytes outside of the pool and of all results may be spared by the kernel, which may check its bounds.
    """
    if len(got[0]) and not np.any(left[0] == got[0][0]):  # most mistakes explain nothing at all
        return False
    own = [(call.pool, call.end), *((where.offset, where.end) for where in call.outputs.values())]

    def inside(changes: Changes) -> np.ndarray:
        return np.any([(changes[0] >= first) & (changes[0] < last) for first, last in own], axis=0)

    ours, theirs = inside(left), inside(got)
    if not same((left[0][ours], left[1][ours]), (got[0][theirs], got[1][theirs])):
        return False
    strays = dict(zip(left[0][~ours].tolist(), left[1][~ours].tolist(), strict=True))
    return all(strays.get(a) == v for a, v in zip(got[0][~theirs].tolist(), got[1][~theirs].tolist(), strict=True))


def same(one: Changes, other: Changes) -> bool:
    """True if the same bytes changed to the same."""
    return np.array_equal(one[0], other[0]) and np.array_equal(one[1], other[1])

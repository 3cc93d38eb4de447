"""Mistakes of strides and offsets: a cache, an input or a result whose elements are taken to lie elsewhere.

Each yields a name and a plan whose sides have other strides, and the ids of the right one. Two axes exchanged come
first, in all caches or in one alone; then pages that are taken to be dense, keys and values that are taken to lie
otherwise to each other, offsets, and the rows that are given or given back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from hkv.layout.strided import dense_strides
from hkv.testing.kernels.call import Call
from hkv.testing.kernels.plans import VALUED, MovePlan, Side, read_bytes

Named = Iterator[tuple[str, MovePlan]]
"""Mistakes with their names."""

Steps = Callable[[tuple[int, ...], tuple[int, ...], int], tuple[int, ...]]
"""Strides from a shape, the right strides, and the bytes of an element."""

AXES = {"row": "blocks", "slot": "slots", "head": "heads", "element": "elements", "layer": "layers"}
"""Axes of a cache in words, by the field of a side that has their stride."""

SWAPPED = (
    ("head", "slot"), ("slot", "element"), ("row", "slot"), ("row", "head"), ("head", "element"), ("row", "element"),
    ("layer", "row"),
)  # fmt: skip
"""Pairs of axes in the order in which they are told."""


def stride_mistakes(plan: MovePlan, call: Call) -> Named:
    """Mistakes of a case, most telling first; a plan that is the right one is none."""
    for mistake in (_swapped, _caches, _keys_and_values, _offsets, _units, _rows):
        for name, changed in mistake(plan, call):
            if any(_differ(side, changed.sides[part]) for part, side in plan.sides.items()):
                yield name, changed


def _differ(one: Side, other: Side) -> bool:
    return one.steps != other.steps or one.content is not other.content or one.places is not other.places


def _swapped(plan: MovePlan, call: Call) -> Named:
    """Two axes of a cache exchanged, in all parts or in one."""
    for one, other in SWAPPED:
        name = f"strides of {AXES[one]} and {AXES[other]} are swapped"
        if (one, other) == ("row", "slot") and call.case.operation == "write":  # to the same places
            name += " (or quotient and remainder of slot ids)"
        yield name, plan.sided(lambda side, one=one, other=other: _exchanged(side, one, other))
        for part in plan.sides if len(plan.sides) > 1 else ():
            side = plan.sides[part]
            yield f"{name} in the {part} cache alone", plan.one(part, **_exchanged(side, one, other))


def _exchanged(side: Side, one: str, other: str) -> Mapping[str, int]:
    return {one: getattr(side, other), other: getattr(side, one)}


def _caches(plan: MovePlan, call: Call) -> Named:
    """Pages taken for others."""
    slots = call.case.block_size // call.case.pieces
    cell = sum(side.size * side.item for side in plan.sides.values())

    def other_order(side: Side) -> Mapping[str, int]:
        step = min(side.head, side.slot)
        return (
            {"head": step * slots, "slot": step} if side.head < side.slot else {"head": step, "slot": step * side.heads}
        )

    yield "a page's heads and slots are taken in the other order", plan.sided(other_order)
    transposed = plan.sided(lambda side: {"slot": side.item, "element": side.item * slots})
    yield "strides of slots and elements are swapped", transposed
    dense = "blocks are taken to lie without gaps (page padding or a block stride is ignored)"
    yield dense, plan.sided(lambda side: {"row": max(side.head * side.heads, side.slot * slots)})
    yield dense, plan.sided(lambda side: {"row": side.heads * slots * side.size * side.item})
    yield dense, plan.sided(lambda side: {"row": side.heads * slots * cell})
    own = {"slot": lambda side: side.heads * side.size * side.item, "head": lambda side: side.size * side.item}
    yield (
        dense,
        plan.sided(
            lambda side: (
                {name: of(side) for name, of in own.items()}
                | {"row": side.heads * slots * side.size * side.item, "element": side.item}
            )
        ),
    )
    yield (
        dense,
        plan.sided(lambda side: {"slot": side.head * side.heads if side.head < side.slot else side.size * side.item}),
    )
    manager = "the stride of a manager block is used for kernel blocks"
    yield manager, plan.sided(lambda side: {"row": side.row * call.case.pieces})


def _keys_and_values(plan: MovePlan, call: Call) -> Named:
    """Keys and values taken to lie otherwise to each other."""
    if not {"key", "value"} <= set(plan.sides):
        return
    key, value = plan.sides["key"], plan.sides["value"]
    if len(plan.sides) == 2:
        confused = "(or the two axes of K/V and blocks are confused)"
        slots, rows = call.case.block_size // call.case.pieces, call.case.blocks * call.case.pieces
        dense = key.heads * slots * key.size * key.item
        first = f"all keys are taken to lie before all values {confused}"
        for page in {dense, abs(value.offset - key.offset)}:
            if value.offset - key.offset != rows * page or key.row != page:
                own = {"row": page, "offset": key.offset + rows * page}
                yield first, plan.one("key", row=page).one("value", **own)
        yield first, plan.one("value", offset=key.offset + rows * key.row // 2)
        if value.offset - key.offset != dense:
            turns = f"keys and values are taken to alternate, block by block {confused}"
            yield turns, plan.one("key", row=2 * dense).one("value", row=2 * dense, offset=key.offset + dense)
    for names in (("row", "head", "slot"), ("head", "slot"), ("slot",), ("head",)):
        yield "strides of values are taken from keys", plan.one("value", **{name: getattr(key, name) for name in names})


def _offsets(plan: MovePlan, call: Call) -> Named:
    if call.case.offset:
        ignored = plan.sided(lambda side: {"offset": side.offset - call.case.offset})
        for changed in (ignored, ignored.but(layer=np.zeros_like(plan.layer))):
            yield "the tensor's offset in its memory is ignored", changed


def _units(plan: MovePlan, call: Call) -> Named:
    """Strides that count something else; a kernel that is given one layer has no stride of layers."""
    names = ["row", "slot", "head", "element", *(["layer"] if call.case.operation in ("copy_blocks", "zero") else [])]
    fewer = plan.sided(lambda side: {name: getattr(side, name) // side.item for name in names})
    yield "strides count elements, and are taken for bytes", fewer
    more = plan.sided(lambda side: {name: getattr(side, name) * side.item for name in names})
    yield "strides in bytes are taken to count elements", more


def _rows(plan: MovePlan, call: Call) -> Named:
    """Inputs, or results given back, taken to lie otherwise."""
    if call.case.source_dtype or not (call.outputs or call.case.operation in VALUED):
        return
    of = "of the result" if call.outputs else "of the inputs"
    found = {part: call.outputs.get(part) or call.arguments[part] for part in plan.sides}

    def changed(strides: Steps, parts: Iterable[str]) -> MovePlan:
        sides = dict(plan.sides)
        for part in parts:
            view = found[part]
            steps = strides(view.shape, view.strides, view.itemsize)
            sides[part] = _with_rows(sides[part], call, view.offset, steps, view.shape)
        return plan.but(sides=sides)

    yield f"the row stride {of} is ignored", changed(lambda n, s, i: dense_strides(n, i), found)
    for parts, name in ((found, of), *(([part], f"{of}, of the {part} alone,") for part in found)):
        heads = f"heads and elements {name} are swapped"
        yield heads, changed(lambda n, s, i: (s[0], s[2], s[1]), parts)
        yield heads, changed(lambda n, s, i: (s[0], i, n[1] * i), parts)
        tokens = f"tokens and heads {name} are swapped"
        yield tokens, changed(lambda n, s, i: (s[1], s[0], s[2]), parts)
        yield tokens, changed(lambda n, s, i: (n[2] * i, n[0] * n[2] * i, i), parts)


def _with_rows(side: Side, call: Call, start: int, strides: tuple[int, ...], shape: tuple[int, ...]) -> Side:
    """A part whose content, or the places of what is gathered, have other strides."""
    steps = (np.arange(count) * stride for count, stride in zip(shape, strides, strict=True))
    rows, heads, elements = steps
    places = start + rows[:, None, None] + heads[:, None] + elements
    if side.places is not None:
        return dataclasses.replace(side, places=places)
    return dataclasses.replace(side, content=read_bytes(call, places[..., None] + np.arange(side.item)))

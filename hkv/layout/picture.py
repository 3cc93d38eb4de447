"""A zoom into one cell of a cache, level by level: what `hkv layout` draws, in the terminal or as a figure.

Each level is a stretch of memory cut into equal pieces along one physical axis, outermost first; the next level is the
chosen piece. The last level is the parts of a cell, or of a row of a plane.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from hkv.layout.block_layout import Layout, Place
from hkv.layout.content import Part


@dataclasses.dataclass(frozen=True)
class Piece:
    """A stretch of memory in a level, `label` its content; a chosen one's inside is shown by the next level.

    `kind` is `layer`, `block`, `kernel`, `head`, `state`, `plane`, `padding`, `other`, or the name of a part.
    """

    label: str
    start: int
    length: int
    kind: str
    chosen: bool = False


class Pieces(Sequence[Piece]):
    """Pieces that are made when they are looked at: a pool may have millions of blocks, and a picture shows a dozen."""

    def __init__(self, count: int, make: Callable[[int], Piece]) -> None:
        self._indices, self._make = range(count), make

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        found = self._indices[index]
        return self._make(found) if isinstance(found, int) else [self._make(one) for one in found]


@dataclasses.dataclass(frozen=True)
class Level:
    """One stretch of memory and its pieces in rising order; gaps between them are of kind `padding` or `other`.

    `title` names the pieces and the distance between them; `length` goes from the first to the end of the last;
    `chosen` is the place of the chosen piece among them.
    """

    title: str
    start: int
    length: int
    pieces: Sequence[Piece]
    chosen: int = 0


AXIS_NAMES = ("layer", "block", "kernel", "head", "state")
"""Kinds of the pieces of `Layout.cells`, in the order of its axes."""


def levels(layout: Layout, place: Place) -> tuple[Level, ...]:
    """The zoom from the whole buffer into the cell at `place`, whose `byte` does not matter, and into its parts."""
    planes = any(part.strides is not None for part in layout.content)
    piece, state = divmod(place.state, layout.shape[3])
    at = (place.layer, place.block, piece, place.head, state)
    shape, strides = layout.cells().shape[:5], layout.cells().strides[:5]
    run = layout.shape[3] * layout.shape[4]
    slots = any(part.steps is not None for part in layout.content)  # each holds a part, of which no token is one run
    own_planes = planes and all(part.strides is not None and part.strides[0] == run for part in layout.content)
    inside = (4,) if own_planes or slots else (3, 4)
    axes = [a for a in range(5) if shape[a] > 1 and not (planes and a in inside)]
    axes.sort(key=lambda a: strides[a], reverse=True)
    page = layout.shape[4]
    if planes:
        page = run if own_planes or slots else run * shape[3]
    found: list[Level] = []
    start = layout.offset
    for depth, axis in enumerate(axes):
        inner = page + sum((shape[a] - 1) * strides[a] for a in axes[depth + 1 :])
        found.append(_axis_level(layout, axis, start, inner, at))
        start += at[axis] * strides[axis]
    if slots:
        mine = [part for part in layout.content if part.first_head == place.head]
        pieces = [Piece(f"{part.name} of all heads and tokens", start, page, part.name) for part in mine]
        return (*found, Level(f"one head slot of {page:,} bytes", start, page, pieces))
    if planes:
        return (*found, *_plane_levels(layout, start, page, at, own_planes))
    return (*found, _part_level("cell", layout.content, start, layout.shape[4], place.head))


def _axis_level(layout: Layout, axis: int, start: int, inner: int, at: tuple[int, ...]) -> Level:
    cells = layout.cells()
    count, stride, name = cells.shape[axis], cells.strides[axis], AXIS_NAMES[axis]
    padding = 0
    if axis < 2 and (layout.order.block_compact or layout.shape[2] == 1):
        padding = min(stride - inner, layout.page_size - layout.split * math.prod(layout.shape[2:]))
    padding = max(padding, 0)
    between: list[tuple[str, int, int, str]] = []
    if padding:
        between.append(("pad", inner, padding, "padding"))
    if stride > inner + padding:
        between.append(("others", inner + padding, stride - inner - padding, "other"))

    def piece(number: int) -> Piece:
        index, kind = divmod(number, 1 + len(between))
        here = start + index * stride
        if kind == 0:
            return Piece(_label(layout, axis, index, at), here, inner, name, index == at[axis])
        label, offset, length, what = between[kind - 1]
        return Piece(label, here + offset, length, what)

    each = 1 + len(between)
    pieces = Pieces(count * each if axis == 1 else (count - 1) * each + 1, piece)
    plural = {"kernel": "kernel blocks", "state": "states"}.get(name, f"{name}s")
    end = pieces[-1].start + pieces[-1].length
    return Level(f"{count:,} {plural}, {stride:,} bytes apart", start, end - start, pieces, at[axis] * each)


def _label(layout: Layout, axis: int, index: int, at: tuple[int, ...]) -> str:
    if axis == 2:
        return f"kernel block {layout.kernel_rows(at[1])[index]}"
    if axis < 4:
        return f"{AXIS_NAMES[axis]} {index}"
    state = at[2] * layout.shape[3] + index
    tokens = layout.tokens_per_state
    if tokens == 1:
        return f"token {state}"
    if tokens is None or tokens < 1:
        return f"state {state}"
    return f"tokens {state * tokens}-{(state + 1) * tokens - 1}"


def _plane_levels(layout: Layout, page: int, length: int, at: tuple[int, ...], one_head: bool) -> list[Level]:
    """The planes of a page, then the rows of the plane that the cell's first part lies in, then that row's parts."""
    planes: list[list[Part]] = []
    for part in sorted(layout.content, key=lambda part: part.offset):
        if (
            planes
            and part.strides == planes[-1][0].strides
            and part.offset < _plane_end(layout, planes[-1][0], one_head)
        ):
            planes[-1].append(part)
        else:
            planes.append([part])
    pieces = []
    for index, plane in enumerate(planes):
        first, end = plane[0].offset, max(_plane_end(layout, part, one_head) for part in plane)
        label = " + ".join(part.name for part in plane)
        pieces.append(Piece(label, page + first, end - first, plane[0].name, index == 0))
    found = [Level(f"{len(planes)} planes of {length:,} bytes", page, length, pieces)]
    chosen, head = planes[0], at[3]
    head_stride, state_stride = chosen[0].strides or (0, 0)
    start, heads = page + chosen[0].offset, _heads(layout, chosen[0], one_head)
    for name, axis, count, stride in (("heads", 3, heads, head_stride), ("rows", 4, layout.shape[3], state_stride)):
        if count > 1:
            own = at[axis] % count
            make = functools.partial(_row, layout, axis, start, stride, (*at[:axis], own, *at[axis + 1 :]))
            title = f"{count} {name}, {stride:,} bytes apart"
            found.append(Level(title, start, count * stride, Pieces(count, make), own))
            start += own * stride
    shifted = [dataclasses.replace(part, offset=part.offset - chosen[0].offset) for part in chosen]
    return [*found, _part_level("row", shifted, start, state_stride, head)]


def _row(layout: Layout, axis: int, start: int, stride: int, at: tuple[int, ...], index: int) -> Piece:
    return Piece(_label(layout, axis, index, at), start + index * stride, stride, AXIS_NAMES[axis], index == at[axis])


def _heads(layout: Layout, part: Part, one_head: bool) -> int:
    return 1 if one_head else (layout.shape[2] if part.heads is None else part.heads)


def _plane_end(layout: Layout, part: Part, one_head: bool) -> int:
    head_stride, state_stride = part.strides or (0, 0)
    return part.offset + (_heads(layout, part, one_head) - 1) * head_stride + layout.shape[3] * state_stride


def _part_level(name: str, parts: Sequence[Part], start: int, length: int, head: int) -> Level:
    mine = [p for p in parts if p.heads is None or p.strides is not None or p.first_head == head]
    pieces: list[Piece] = []
    end = 0
    for part in sorted(mine, key=lambda part: part.offset):
        shape = "x".join(map(str, part.shape))
        pieces.append(Piece(f"{part.name} {shape} {part.dtype}", start + part.offset, part.nbytes, part.name))
        end = part.offset + part.nbytes
    if end < length:
        pieces.append(Piece("unused", start + end, length - end, "padding"))
    return Level(f"one {name} of {length:,} bytes", start, length, pieces)


def shown(level: Level, limit: int) -> tuple[Piece | None, ...]:
    """At least five pieces of a level, first, last and chosen ones kept, and None for each run left out."""
    pieces = level.pieces
    if len(pieces) <= limit:
        return tuple(pieces)
    around = (limit - 4) // 2
    near = range(max(0, level.chosen - around), min(len(pieces), level.chosen + around + 1))
    wanted = {0, 1, len(pieces) - 1, *near}
    kept: list[Piece | None] = []
    for index in sorted(wanted):
        if index and index - 1 not in wanted:
            kept.append(None)
        kept.append(pieces[index])
    return tuple(kept)

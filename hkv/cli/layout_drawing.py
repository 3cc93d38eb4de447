"""Draws the levels of a layout: boxes in the terminal, a figure as SVG or PNG."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Group
from rich.table import Table
from rich.text import Text

from hkv.cli.output_option import console, table
from hkv.errors import ConfigError, LayoutError, MissingExtraError
from hkv.files import decode_json, read_whole
from hkv.layout.picture import Level, Piece, shown
from hkv.layout.strided import StridedView

COLOURS = {
    "layer": "#4e79a7",
    "block": "#59a14f",
    "kernel": "#8cd17d",
    "head": "#f28e2b",
    "state": "#b07aa1",
    "padding": "#d4d4d4",
    "other": "#eeeeee",
}
"""Fill of a piece by its kind; parts take theirs from `PARTS`."""

PARTS = ("#e15759", "#76b7b2", "#edc948", "#ff9da7", "#9c755f", "#86bcb6")
"""Fills of parts, in the order in which they lie."""


def colour(piece: Piece, names: Sequence[str]) -> str:
    """The fill of a piece, `names` being the names of all parts in order."""
    if piece.kind in COLOURS:
        return COLOURS[piece.kind]
    return PARTS[list(names).index(piece.kind) % len(PARTS)]


def terminal(levels: Sequence[Level], names: Sequence[str], width: int) -> Group:
    """The levels as rows of coloured boxes, `width` columns wide, with each box's first byte below it."""
    lines: list[Text] = []
    for depth, level in enumerate(levels):
        title = Text(("└ " if depth else "") + level.title, style="bold")
        lines.append(title + Text(f"  bytes {level.start:,} to {level.start + level.length - 1:,}", style="dim"))
        pieces = shown(level, max(6, width // 13))
        widths = _widths(pieces, width)
        boxes, below = Text(), Text(style="dim")
        for index, (piece, columns) in enumerate(zip(pieces, widths, strict=True)):
            if piece is None:
                boxes.append(_fit("⋯", columns))
                below.append(" " * columns)
                continue
            edge = "▏" if index else " "
            style = f"{'bold ' if piece.chosen else ''}black on {colour(piece, names)}"
            boxes.append(edge + _fit(("▶ " if piece.chosen else "") + piece.label, columns - 1), style=style)
            below.append(_fit(f"{piece.start:,}", columns, left=True))
        lines += [boxes, below, Text()]
    return Group(*lines[:-1])


def _widths(pieces: Sequence[Piece | None], width: int) -> list[int]:
    """Columns of each box: at least as wide as its first byte's number, the rest shared out by what labels need."""
    wanted = [3 if p is None else max(len(p.label) + (4 if p.chosen else 2), len(f"{p.start:,}") + 1) for p in pieces]
    least = [3 if p is None else max(6, len(f"{p.start:,}") + 1) for p in pieces]
    spare = width - sum(least)
    if spare <= 0:
        return least
    missing = [w - m for w, m in zip(wanted, least, strict=True)]
    if sum(missing) > spare:
        return [m + spare * gap // sum(missing) for m, gap in zip(least, missing, strict=True)]
    real = [p is not None for p in pieces]
    share = (width - sum(wanted)) // max(1, sum(real))
    return [w + share * is_real for w, is_real in zip(wanted, real, strict=True)]


def _fit(text: str, columns: int, left: bool = False) -> str:
    if len(text) > columns:
        text = text[: max(0, columns - 1)] + "…"
    return text.ljust(columns) if left else text.center(columns)


def figure(levels: Sequence[Level], names: Sequence[str], title: str, path: str) -> bytes:
    """The levels as a figure; the ending of the file that it is for, `.svg` or `.png`, says which kind; SVG for `-`."""
    kind = "svg" if path == "-" else pathlib.Path(path).suffix.lower().removeprefix(".")
    if kind not in ("svg", "png"):
        raise LayoutError("--image", path, "a file that ends in .svg or .png")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "plots", "to draw a layout") from None
    drawing = Figure(figsize=(12, 0.9 + 1.15 * len(levels)))
    FigureCanvasAgg(drawing)
    axes = drawing.add_axes((0.02, 0.02, 0.96, 0.96))
    axes.set_xlim(0, 100)
    axes.set_ylim(-1.15 * len(levels) + 0.35, 0.75)
    axes.axis("off")
    axes.text(0, 0.6, title, fontsize=13, weight="bold", va="center")
    axes.text(100, 0.6, "boxes are not to scale; numbers are first bytes", fontsize=8.5, color="#777777", ha="right")
    above: tuple[float, float] | None = None
    for depth, level in enumerate(levels):
        above = _draw_level(axes, level, names, -1.15 * depth, above)
    stored = io.BytesIO()
    drawing.savefig(stored, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return stored.getvalue()


def _draw_level(
    axes, level: Level, names: Sequence[str], y: float, above: tuple[float, float] | None
) -> tuple[float, float] | None:
    """Draws one row of boxes at `y` below the box that it shows the inside of; returns its own chosen one."""
    if above is not None:
        axes.fill([0, above[0], above[1], 100], [y, y + 0.72, y + 0.72, y], color="#f4f4f4", zorder=0)
        axes.plot([0, above[0]], [y, y + 0.72], color="#bbbbbb", linewidth=0.8, zorder=1)
        axes.plot([100, above[1]], [y, y + 0.72], color="#bbbbbb", linewidth=0.8, zorder=1)
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    axes.text(0.2, y + 0.12, level.title, fontsize=9.5, color="#222222", va="center", zorder=5, bbox=behind)
    pieces = shown(level, 14)
    weights = [
        0.35 if p is None else (0.6 if p.kind in ("padding", "other") else max(1.0, 0.13 * len(p.label)))
        for p in pieces
    ]
    if all(p is not None and not p.chosen for p in pieces):
        weights = [max(w, 8 * p.length / level.length) for w, p in zip(weights, pieces, strict=True) if p is not None]
    unit, x, chosen = 100 / sum(weights), 0.0, None
    for piece, weight in zip(pieces, weights, strict=True):
        right = x + weight * unit
        if piece is None:
            axes.text((x + right) / 2, y - 0.2, "⋯", ha="center", va="center", fontsize=12)
        else:
            _draw_piece(axes, piece, colour(piece, names), x, right, y)
            chosen = (x, right) if piece.chosen else chosen
        x = right
    ends = f"bytes {level.start:,} to {level.start + level.length - 1:,}"
    axes.text(99.8, y + 0.12, ends, fontsize=8.5, color="#555555", ha="right", va="center", zorder=5, bbox=behind)
    return chosen


def _draw_piece(axes, piece: Piece, fill: str, left: float, right: float, y: float) -> None:
    hatch = "///" if piece.kind == "padding" else ("..." if piece.kind == "other" else None)
    axes.fill(
        [left, right, right, left],
        [y, y, y - 0.43, y - 0.43],
        facecolor=fill,
        edgecolor="#333333" if piece.chosen else "#ffffff",
        linewidth=2.0 if piece.chosen else 1.0,
        hatch=hatch,
        zorder=3 if piece.chosen else 2,
    )
    dark = piece.kind in ("layer", "block", "state", "head")
    room = int((right - left) * 1.45)
    label = piece.label if len(piece.label) <= room else piece.label[: max(0, room - 1)] + "…"
    axes.text(
        (left + right) / 2,
        y - 0.16,
        label,
        ha="center",
        va="center",
        fontsize=9,
        weight="bold" if piece.chosen else "normal",
        color="#ffffff" if dark else "#222222",
        zorder=4,
    )
    small = f"{piece.start:,}"
    if len(small) <= (right - left) * 1.7:
        axes.text(
            left + 0.25,
            y - 0.34,
            small,
            ha="left",
            va="center",
            fontsize=7.5,
            color="#ffffff" if dark else "#444444",
            zorder=4,
        )


# Views of a plan's layers for `hkv layout --plan`: where each lies in its pool, and which element a byte is.


class PlannedView(NamedTuple):
    """A part of one layer's cache: `[rows, heads, states, ...]` of a pool's bytes, some rows being one block's."""

    layer: int
    tag: str
    pool: int
    part: str
    view: StridedView
    kernel_blocks: int


def planned_views(path: str) -> list[PlannedView]:
    """All views of the plan that `hkv plan --json FILE` wrote; ConfigError where it lays out no pools."""
    expected = "a plan that lays its pools out, as hkv plan --json writes it under a dialect with layer caches"
    report = decode_json(read_whole(path), path, None, expected)
    try:
        return [
            PlannedView(int(layer), cache["tag"], cache["pool"], part, _view(view), cache["kernel_blocks"])
            for layer, caches in report["layer_caches"].items()
            for cache in caches
            for part, view in cache["parts"].items()
        ]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError("--plan", path, expected) from error


def _view(fields: dict[str, Any]) -> StridedView:
    return StridedView(tuple(fields["shape"]), tuple(fields["strides"]), fields["offset"], fields["dtype"])


def selected(views: Sequence[PlannedView], layer: int | None, tag: str | None) -> list[PlannedView]:
    """The views of a layer and of a group, or all; ConfigError if it has none."""
    layers = sorted({view.layer for view in views})
    if layer is not None and layer not in layers:
        raise ConfigError("--layer", layer, f"a layer of the plan, from {layers[0]} to {layers[-1]}")
    mine = [view for view in views if layer in (None, view.layer)]
    if tag is not None and tag not in {view.tag for view in mine}:
        raise ConfigError("--tag", tag, f"one of {', '.join(dict.fromkeys(view.tag for view in mine))}")
    return [view for view in mine if tag in (None, view.tag)]


def check_place(views: Sequence[PlannedView], pool: int, offsets: Sequence[int]) -> None:
    """Checks that a plan has a pool, and the pool those bytes."""
    pools = sorted({view.pool for view in views})
    if pool not in pools:
        raise ConfigError("--pool", pool, f"a pool of the plan, from {pools[0]} to {pools[-1]}")
    end = max(planned.view.end for planned in views if planned.pool == pool)
    for byte in offsets:
        if byte >= end:
            raise ConfigError("--byte", byte, f"less than {end}, where the last element of pool {pool} ends")


def held(views: Sequence[PlannedView], pool: int, byte: int) -> list[dict[str, Any]]:
    """Elements that a byte of a pool belongs to: one a group where groups share a pool.

    Otherwise one record without a `part`: padding, or an element of a layer that was not chosen.
    """
    found = []
    for planned in views:
        place = planned.view.locate(byte) if planned.pool == pool else None
        if place is not None:
            (row, head, state, *index), inside = place
            block, kernel_block = divmod(row, planned.kernel_blocks)
            found.append(
                {
                    "byte": byte,
                    "pool": pool,
                    "layer": planned.layer,
                    "tag": planned.tag,
                    "block": block,
                    "kernel_block": kernel_block,
                    "part": planned.part,
                    "head": head,
                    "state": state,
                    "index": index,
                    "dtype": planned.view.dtype,
                    "byte_of_element": inside,
                }
            )
    return found or [{"byte": byte, "pool": pool, "part": None}]


def view_record(planned: PlannedView) -> dict[str, Any]:
    """A view as plain values."""
    view = planned.view
    return {
        "layer": planned.layer,
        "tag": planned.tag,
        "pool": planned.pool,
        "part": planned.part,
        "dtype": view.dtype,
        "shape": list(view.shape),
        "strides": list(view.strides),
        "offset": view.offset,
    }


def print_views(views: Sequence[dict[str, Any]], bytes_held: Sequence[dict[str, Any]]) -> None:
    """Prints views and answers, each as a table."""
    out = console(wide=False, highlight=False)
    if views:
        out.print(_table("Views, strides in bytes", views))
    if elements := [answer for answer in bytes_held if answer["part"] is not None]:
        out.print(_table("Bytes", elements))
    for answer in bytes_held:
        if answer["part"] is None:
            out.print(f"byte {answer['byte']} of pool {answer['pool']}: padding, or no element of a chosen layer")


def _table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    cells = (
        (", ".join(map(str, value)) if isinstance(value, list) else value for value in row.values()) for row in rows
    )
    return table("|".join(rows[0]).replace("_", " "), cells, title=title)

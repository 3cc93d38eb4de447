"""Draws the levels of a layout: boxes in the terminal, a figure as SVG or PNG."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Sequence

from rich.console import Console, Group
from rich.text import Text

from hkv.errors import LayoutError, MissingExtraError
from hkv.layout.picture import Level, Piece, shown

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
        end = level.pieces[-1].start + level.pieces[-1].length
        title = Text(("└ " if depth else "") + level.title, style="bold")
        lines.append(title + Text(f"  bytes {level.start:,} to {end - 1:,}", style="dim"))
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
    """The levels as a figure; the ending of the file that it is for, `.svg` or `.png`, says which kind; SVG for `-`.

    Raises:
      LayoutError: another ending.
      MissingExtraError: Matplotlib is not installed.
    """
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
    ends = f"bytes {level.start:,} to {level.pieces[-1].start + level.pieces[-1].length - 1:,}"
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


def show(console: Console, levels: Sequence[Level], names: Sequence[str]) -> None:
    """Prints the levels at the console's width."""
    console.print(terminal(levels, names, min(console.width, 132)), highlight=False, no_wrap=True)

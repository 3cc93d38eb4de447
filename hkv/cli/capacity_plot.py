"""Draws how many requests fit against how long they are: a line for each model and choice of other options."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Sequence
from typing import Any

from hkv.cli.capacity_rows import CapacityRow
from hkv.cli.capacity_table import LENGTH
from hkv.errors import ConfigError
from hkv.plot_path import check_plot_path

COLOURS = ("#2a7f9e", "#c8553d", "#7a9e3f", "#8a5a9e", "#d19a2a", "#12313d", "#5a6c75", "#b0487a", "#3f8f7a", "#8c6d46")
"""One a model, in turn."""

DASHES = ("-", "--", ":", "-.")
"""One for each value of the first option that has several, beside the length."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
"""One for each value of the second."""


def lengths_between(rows: Sequence[CapacityRow]) -> list[tuple[str, dict[str, Any]]]:
    """Combinations that a table does not have: each line's powers of two between its shortest and longest request."""
    names = _varying(rows)
    series: dict[tuple[str, ...], dict[int, CapacityRow]] = {}
    for row in rows:
        if row.capacity is not None and LENGTH in row.options:
            key = (row.model, *(str(row.options[name]) for name in names))
            series.setdefault(key, {})[row.capacity.max_model_len] = row
    wanted = []
    for planned in series.values():
        row, longest = next(iter(planned.values())), max(planned)
        powers = (1 << power for power in range(min(planned).bit_length(), longest.bit_length()))
        between = [length for length in powers if length < longest and length not in planned]
        wanted += [(row.model, {**row.options, LENGTH: str(length)}) for length in between]
    return wanted


def drawn(rows: Sequence[CapacityRow], path: str, between: Sequence[CapacityRow] = ()) -> bytes:
    """The plot, PNG or SVG by the suffix of the path that it is for; refused rows are left out.

    Args:
      rows: of the table; each is a mark.
      path: the file it is for; SVG for `-`.
      between: rows of `lengths_between`, through which the lines go without a mark.

    Raises:
      ConfigError: no row has anything to draw.
    """
    check_plot_path(path)
    lines = _lines([*rows, *between], _varying(rows))
    if not lines:
        raise ConfigError("plot", path, "at least one row that is not refused, of a model that caches something")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    models = list(dict.fromkeys(model for (model, _), _ in lines))
    styles = [(name, list(dict.fromkeys(row.options[name] for row in rows))) for name in _varying(rows)]
    asked = {row.capacity.max_model_len for row in rows if row.capacity is not None}
    for (model, choice), unordered in lines:
        points = sorted(unordered)
        marked = [index for index, (length, _) in enumerate(points) if length in asked]
        places = [values.index(choice[name]) for name, values in styles[:2]] + [0, 0]
        style = _style(models.index(model), places[0], places[1])
        panel.plot(*zip(*points, strict=True), markevery=marked, markersize=5, linewidth=1.6, **style)
    lengths = sorted(asked)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(lengths[:: len(lengths) // 10 + 1])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter("{x:,.0f}")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter("{x:,g}")
    panel.set_xlabel("tokens of each request")
    panel.set_ylabel("requests that fit at once, as the engine counts them")
    panel.axhline(1, color="#9aa5ab", linewidth=0.8)
    panel.grid(True, color="#e3e6e8", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    figure.legend(handles=_legend(models, styles[:2]), loc="outside right upper", frameon=False, fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg" if path == "-" else pathlib.Path(path).suffix[1:].lower(), dpi=130)
    return buffer.getvalue()


def _varying(rows: Sequence[CapacityRow]) -> list[str]:
    """Options beside the length that have several values."""
    return [name for name in rows[0].options if name != LENGTH and len({row.options[name] for row in rows}) > 1]


def _lines(
    rows: Sequence[CapacityRow], names: Sequence[str]
) -> list[tuple[tuple[str, dict[str, Any]], list[tuple[int, float]]]]:
    """Points of each line, lengths with what fits: the model and the named options beside them."""
    lines: dict[tuple[str, ...], list[tuple[int, float]]] = {}
    choices: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        if row.capacity is not None and row.capacity.concurrency is not None:
            key = (row.model, *(str(row.options[name]) for name in names))
            choices[key] = {name: row.options[name] for name in names}
            lines.setdefault(key, []).append((row.capacity.max_model_len, row.capacity.concurrency))
    return [((key[0], choices[key]), points) for key, points in lines.items()]


def _style(model: int, dash: int, marker: int) -> dict[str, Any]:
    return {
        "color": COLOURS[model % len(COLOURS)],
        "linestyle": DASHES[dash % len(DASHES)],
        "marker": MARKERS[marker % len(MARKERS)],
    }


def _legend(models: Sequence[str], styles: Sequence[tuple[str, Sequence[Any]]]) -> list[Any]:
    """A line for each model by its colour, then one for each value of the two options by dash and marker."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=COLOURS[i % len(COLOURS)], label=_title(name)) for i, name in enumerate(models)]
    dashes: list[dict[str, Any]] = [{"linestyle": dash} for dash in DASHES]
    markers: list[dict[str, Any]] = [{"linestyle": "", "marker": marker} for marker in MARKERS]
    for (name, values), different in zip(styles, (dashes, markers), strict=False):
        for place, value in enumerate(values):
            label = f"{name.replace('_', '-').replace('-dtype', '')} {value}"
            handles.append(Line2D([], [], color="#222222", label=label, **different[place % len(different)]))
    return handles


def _title(model: str) -> str:
    path = pathlib.Path(model)
    return path.parent.name if path.name == "config.json" else path.stem if path.suffix == ".json" else model

"""A capacity table for people, 80 columns and up, and as CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import pathlib
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hkv.contract.options import Several, check_plot_path
from hkv.contract.plan_command import Capacity
from hkv.errors import ConfigError, HKVError
from hkv.limits import show_bytes

LENGTH = "max_model_len"
"""The option whose value a plan may change; its column shows the plan's."""

HEADINGS = (
    "longest\nrequest",
    "a\ntoken",
    "a se-\nquence",
    "blocks",
    "tokens",
    "concur-\nrency",
    "simu-\nlated",
    "limited\nby",
    "waste",
)

WEIGHTS = "weights\na GPU"
"""Heading of the weights on a GPU, where they are a part of the answer."""


def table_lines(rows: Sequence[CapacityRow], width: int) -> Iterator[str]:
    """The table's lines: each model's name, and below it a row for each choice of options that differ.

    Where no model has several rows, and the width allows, its name is in the row. A refused combination has its reason
    in the place of what fits; only reasons are broken to fit the width.
    """
    names = _varying(rows)
    weighed = any(row.capacity is not None and row.capacity.weights is not None for row in rows)
    headings = [*(name.replace("_", "-").replace("-dtype", "") for name in names), *HEADINGS]
    if weighed:
        headings.insert(len(names) + 1, WEIGHTS)
    bodies = [[*(str(row.options[name]) for name in names), *_cells(row, weighed)] for row in rows]
    head = [["", *heading.split("\n")][-2:] for heading in headings]
    widths = [max(map(len, (*lines, *(body[i] for body in bodies if i < len(body))))) for i, lines in enumerate(head)]
    margin = max(len(row.model) for row in rows) + 1
    if len({row.model for row in rows}) < len(rows) or margin + sum(widths) + len(widths) > width:
        margin = 0
    for line in zip(*head, strict=True):
        yield " " * margin + _line(line, widths)
    for model, group in itertools.groupby(zip(rows, bodies, strict=True), lambda pair: pair[0].model):
        pairs = list(group)
        if not margin:
            yield model
        if all(row.refused for row, _ in pairs) and len({row.refused for row, _ in pairs}) == 1:
            yield from _reason(f"{model.ljust(margin) if margin else ''}  refused: ", pairs[0][0].refused, width)
            continue
        for row, body in pairs:
            cells = (model.ljust(margin) if margin else "") + _line(body, widths)
            if row.capacity is None:
                yield from _reason(f"{cells}  refused: ", row.refused, width)
                continue
            yield cells
            if row.capacity.not_started:
                yield from _reason("    ", row.capacity.not_started, width)


def table_csv(rows: Sequence[CapacityRow]) -> bytes:
    """The table as CSV in UTF-8: a heading, and a line for each row. A refused row has its reason in the last field."""
    fields = [field.name for field in dataclasses.fields(Capacity)]
    heading = ["model", *(name for name in rows[0].options if name not in fields), *fields, "refused"]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, heading, restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: value for name, value in row.record().items() if value is not None})
    return buffer.getvalue().encode()


def _reason(start: str, reason: str, width: int) -> list[str]:
    return textwrap.wrap(reason, width, initial_indent=start, subsequent_indent=" " * 4)


def _cells(row: CapacityRow, weighed: bool) -> list[str]:
    """Cells besides the options, with one of weights if there is that column; the length alone for a refused row."""
    fits = row.capacity
    if fits is None:
        return [_length(row.options.get(LENGTH))]
    return [
        f"{fits.max_model_len:,}",
        *([_size(fits.weights or 0)] if weighed else ()),
        _size(fits.token_bytes),
        _size(fits.sequence_bytes),
        f"{fits.num_blocks:,}",
        f"{fits.tokens:,}",
        "-" if fits.concurrency is None else f"{fits.concurrency:,.2f}",
        f"{fits.requests:,}",
        fits.limiting or "-",
        f"{fits.waste:.1%}",
    ]


def _size(count: float) -> str:
    """Bytes in three digits; `-` for none."""
    number, unit = show_bytes(count).split()
    digits = 0 if len(number.partition(".")[0]) > 2 else 1
    return f"{round(float(number.replace(',', '')), digits):g}{unit}" if count else "-"


def _length(value: Any) -> str:
    return f"{int(value):,}" if str(value).isdigit() else "-" if value is None else str(value)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return " ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=False)).rstrip()


# Every combination of models and options, planned: the rows of a capacity table.

MOST_ROWS = 10_000
"""A table that is longer is refused."""


@dataclasses.dataclass(frozen=True)
class CapacityRow:
    """One model under one choice of options that may have several values, and what fits, or why it was refused."""

    model: str
    options: dict[str, Any]
    capacity: Capacity | None
    refused: str = ""

    def record(self) -> dict[str, Any]:
        """The row as plain values."""
        fits = {} if self.capacity is None else dataclasses.asdict(self.capacity)
        return {"model": self.model, **self.options, **fits, "refused": self.refused or None}


def combinations(configs: Sequence[str], options: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Each config with each combination of the options that were given several values, the last varying fastest."""
    lists = {name: values for name, values in options.items() if isinstance(values, Several)}
    chosen = [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]
    if len(configs) * len(chosen) > MOST_ROWS:
        raise ConfigError("rows of the table", len(configs) * len(chosen), f"at most {MOST_ROWS:,}")
    return [(config, choice) for config in configs for choice in chosen]


def capacity_rows(
    wanted: Sequence[tuple[str, dict[str, Any]]], capacity: Callable[[str, dict[str, Any]], Capacity]
) -> list[CapacityRow]:
    """A row for each config and choice of options; where all were refused, and for one reason, that error is raised."""
    rows: list[CapacityRow] = []
    errors: list[HKVError] = []
    for config, choice in wanted:
        try:
            rows.append(CapacityRow(config, choice, capacity(config, choice)))
        except HKVError as error:
            errors.append(error)
            rows.append(CapacityRow(config, choice, None, " ".join(str(error).split())))
    if len(errors) == len(rows) and len({row.refused for row in rows}) == 1:
        raise errors[0]
    return rows


# Draws how many requests fit against how long they are: a line for each model and choice of other options.

COLOURS = ("#2a7f9e", "#c8553d", "#7a9e3f", "#8a5a9e", "#d19a2a", "#12313d", "#5a6c75", "#b0487a", "#3f8f7a", "#8c6d46")
"""One a model, in turn."""

DASHES = ("-", "--", ":", "-.")
"""One for each value of the first option that has several, besides the length."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
"""One for each value of the second."""


def lengths_between(rows: Sequence[CapacityRow]) -> list[tuple[str, dict[str, Any]]]:
    """Combinations that a table does not have: each line's powers of two between its shortest and longest request."""
    wanted = []
    for (model, _), planned in _series([row for row in rows if LENGTH in row.options], _varying(rows)):
        lengths = {fits.max_model_len for _, fits in planned}
        powers = (1 << power for power in range(min(lengths).bit_length(), max(lengths).bit_length()))
        between = [length for length in powers if length < max(lengths) and length not in lengths]
        wanted += [(model, {**planned[0][0].options, LENGTH: str(length)}) for length in between]
    return wanted


def drawn(rows: Sequence[CapacityRow], path: str, between: Sequence[CapacityRow] = ()) -> bytes:
    """The plot, PNG or SVG by the suffix of the path that it is for, SVG for `-`; refused rows are left out.

    Each row of the table is a mark; lines go through those `between`, of `lengths_between`, without one.
    """
    check_plot_path(path)
    cached = [row for row in (*rows, *between) if row.capacity is not None and row.capacity.concurrency is not None]
    lines = _series(cached, _varying(rows))
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
        points = sorted((fits.max_model_len, fits.concurrency or 0.0) for _, fits in unordered)
        marked = [index for index, (length, _) in enumerate(points) if length in asked]
        places = [values.index(choice[name]) for name, values in styles[:2]] + [0, 0]
        style: dict[str, Any] = {
            "color": COLOURS[models.index(model) % len(COLOURS)],
            "linestyle": DASHES[places[0] % len(DASHES)],
            "marker": MARKERS[places[1] % len(MARKERS)],
        }
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
    """Options besides the length that have several values."""
    return [name for name in rows[0].options if name != LENGTH and len({row.options[name] for row in rows}) > 1]


def _series(
    rows: Sequence[CapacityRow], names: Sequence[str]
) -> list[tuple[tuple[str, dict[str, Any]], list[tuple[CapacityRow, Capacity]]]]:
    """Rows that are not refused, with what fits, by the model and the named options."""
    found: dict[tuple[str, ...], list[tuple[CapacityRow, Capacity]]] = {}
    for row in rows:
        if row.capacity is not None:
            key = (row.model, *(str(row.options[name]) for name in names))
            found.setdefault(key, []).append((row, row.capacity))
    return [((key[0], {name: each[0][0].options[name] for name in names}), each) for key, each in found.items()]


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

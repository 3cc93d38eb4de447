"""A capacity table for people, 80 columns and up, and as CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from hkv.byte_size import show_bytes
from hkv.cli.capacity_rows import CapacityRow
from hkv.contract.plan_command import Capacity

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
    in the place of what fits.

    Args:
      rows: of one model after the other.
      width: columns of the terminal; only reasons are broken to fit.
    """
    names = [name for name in rows[0].options if name != LENGTH and len({row.options[name] for row in rows}) > 1]
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
            yield from _refusal(model.ljust(margin) if margin else "", pairs[0][0].refused, width)
            continue
        for row, body in pairs:
            cells = (model.ljust(margin) if margin else "") + _line(body, widths)
            yield from [cells] if row.capacity is not None else _refusal(cells, row.refused, width)


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


def _refusal(start: str, reason: str, width: int) -> list[str]:
    return textwrap.wrap(f"refused: {reason}", width, initial_indent=f"{start}  ", subsequent_indent=" " * 4)


def _cells(row: CapacityRow, weighed: bool) -> list[str]:
    """Cells beside the options: all of them, or the length alone for a refused row.

    Args:
      row: the row.
      weighed: there is a column of weights.
    """
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

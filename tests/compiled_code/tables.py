"""The tables of `docs/tables/compiled-code.md`, made from the records, and how two sets of records differ."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

from tests.compiled_code import cases, record
from tests.compiled_code.record import Record

PAGE = pathlib.Path(__file__).resolve().parent.parent.parent / "docs" / "tables" / "compiled-code.md"
START, END = "<!-- tables -->", "<!-- end of tables -->"
Records = Mapping[str, Mapping[str, Record]]


def all_problems(found: Records, only: str = "") -> list[str]:
    """Everything that is wrong, one line each."""
    return [
        f"{gpu} {case.name}: {problem}"
        for gpu, rows in found.items()
        for case in cases.all_cases()
        if case.name in rows and only in case.name
        for problem in record.problems(case, rows[case.name])
    ]


def differences(recorded: Records, found: Records) -> list[str]:
    """Programs that compile to something else than was recorded, one line each."""
    lines = []
    for gpu, rows in found.items():
        for name in sorted({*rows, *recorded[gpu]}):
            old, new = recorded[gpu].get(name), rows.get(name)
            if old != new:
                lines.append(f"{gpu} {name}: recorded {old and record.kept(old)}, found {new and record.kept(new)}")
    return lines


def write(found: Records) -> None:
    """Puts the tables into the page."""
    page = PAGE.read_text(encoding="utf-8")
    start, end = page.index(START) + len(START), page.index(END)
    PAGE.write_text(page[:start] + "\n\n" + text(found) + "\n" + page[end:], encoding="utf-8")


def text(found: Records) -> str:
    """All tables, as Markdown."""
    parts = []
    for gpu, rows in found.items():
        parts += [f"### {gpu}", "", *_summary(rows), ""]
    parts += ["### What exceeds 1.05, all on sm_90", "", *_exceptions(found["sm_90"])]
    return "\n".join(parts) + "\n"


def _summary(rows: Mapping[str, Record]) -> list[str]:
    lines = [
        "| operation | implementation | programs | refused | traffic over ideal | launches that move | all launches "
        "| loads, B | stores, B | atomics | spilled, B |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    everything = [case for case in cases.all_cases() if case.name in rows]
    for operation in dict.fromkeys(case.operation for case in everything):
        for code in cases.IMPLEMENTATIONS:
            mine = [rows[c.name] for c in everything if (c.operation, c.implementation) == (operation, code)]
            if mine:
                lines.append(f"| {operation} | `{code}` | {_figures(mine)} |")
    return lines


def _figures(mine: Sequence[Record]) -> str:
    done = [row for row in mine if not row.refused]
    if not done:
        return f"{len(mine)} | {len(mine)} |" + " | " * 6
    columns = (
        len(mine),
        len(mine) - len(done),
        _span([f"{row.ratio:.2f}" for row in done]),
        _span([row.moving for row in done]),
        _span([row.launches for row in done]),
        _span([row.load for row in done if row.load]),
        _span([row.store for row in done]),
        sum(bool(row.atomics) for row in done),
        sum(row.spilled for row in done),
    )
    return " | ".join(map(str, columns))


def _span(values: Sequence[str | int]) -> str:
    if not values:
        return ""
    least, most = min(values), max(values)
    return str(least) if least == most else f"{least} to {most}"


def _exceptions(rows: Mapping[str, Record]) -> list[str]:
    lines = ["| operation | implementation | layouts | traffic over ideal | reason |", "|---|---|---|--:|---|"]
    found: dict[tuple[str, str, str | None], list[tuple[str, float]]] = {}
    for case in cases.all_cases():
        row = rows.get(case.name)
        if row is not None and row.ratio > record.LIMIT:
            key = (case.operation, case.implementation, record.exception(case))
            found.setdefault(key, []).append((case.layout, row.ratio))
    for (operation, code, reason), mine in found.items():
        layouts = ", ".join(layout for layout, _ in mine) if len(mine) < 4 else "all"
        ratios = _span([f"{ratio:.2f}" for _, ratio in mine])
        lines.append(f"| {operation} | `{code}` | {layouts} | {ratios} | {reason} |")
    return lines

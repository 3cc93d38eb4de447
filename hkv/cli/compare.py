"""`hkv compare`: replays of one trace, saved or made now, held against each other."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import click
from rich.table import Table

from hkv.cli.html import html_field, write_data
from hkv.cli.options import command_of
from hkv.cli.output_option import Reported, console, plot_field, table, talks, write_json, write_output
from hkv.cli.progress import progress_bar
from hkv.cli.replay import Words, parsed, points_of
from hkv.contract.options import argument, check_plot_path, option
from hkv.limits import MAX_COUNT, MAX_WORKERS, counted
from hkv.replay import pages, plot
from hkv.replay.attribution import CAUSES
from hkv.replay.compare import TOTALS, CompareResult, Side, compared, most_changed, read_side
from hkv.replay.swept import at_once, replayed
from hkv.replay.traces.interned import InternedTrace
from hkv.replay.traces.reader import read_trace


@dataclasses.dataclass(frozen=True, kw_only=True)
class _CompareOptions(Reported):
    given: tuple[str, ...] = argument(
        nargs=-1, required=True, type=click.UNPROCESSED, metavar="REPLAY REPLAY... | TRACE [OPTIONS OF REPLAY]"
    )
    jobs: int | None = option(type=click.IntRange(1, MAX_WORKERS), help="Replays at once.  [default: one a processor]")
    most: int = option(
        5, "--requests", type=click.IntRange(0, MAX_COUNT), help="Show so many of the requests whose hits differ most."
    )
    plot_path: str | None = plot_field("Draw hit rates and causes; .png or .svg.")
    html: str | None = html_field("hits request by request, and why they differ")


@command_of("compare", _CompareOptions, context_settings={"ignore_unknown_options": True})
def command(given: _CompareOptions) -> None:
    """Hold replays of one trace against each other: totals, requests whose hits differ, and why.

    Either several files that `hkv replay --json` wrote, the first being what the others are held against; or one TRACE
    with options of `hkv replay`, some of them with several values as `hkv sweep` takes them, each combination being one
    of the replays.

    \b
    Example:
      hkv replay chat.jsonl --groups full:16 --num-blocks 900 --json lru.json
      hkv compare lru.json other.json --plot both.png
      hkv compare chat.jsonl --groups full:16,swa:16:1024 --num-blocks 4000 --retention dense,0
    """
    if given.plot_path:
        check_plot_path(given.plot_path)
    words = parsed(given.given)
    sides = _saved(words) if len(words.files) > 1 else _made(words, given.jobs or os.cpu_count() or 1)
    result = compared(sides)
    if given.plot_path:
        title = " and ".join(map(_short, result.names))
        write_output(given.plot_path, plot.drawn_comparison(result, given.plot_path, title))
    if given.html:
        title = f"hkv compare: {' and '.join(map(_short, result.names))}"
        write_data(given.html, pages.comparison_data(result, sides, title))
    write_json(given.json_path, _document(result))
    if talks(given.plot_path, given.html, given.json_path):
        _print(result, sides, given.most)


def _saved(words: Words) -> list[Side]:
    if words.fixed or words.axes:
        option = next(iter((*(each[0] for each in words.fixed), *words.axes)))
        raise click.UsageError(f"{option} is for a TRACE; the replays {', '.join(words.files)} have been made")
    return [read_side(path) for path in words.files]


def _made(words: Words, jobs: int) -> list[Side]:
    if not words.files:
        raise click.UsageError("a TRACE, or at least two replays that were saved, are wanted")
    points = points_of(words)
    if len(points) < 2:
        raise click.UsageError("one option at least has to have several values, or else several saved replays be given")
    varying = [option for option, values in words.axes.items() if len(values) > 1]
    known = points[0].options
    trace = InternedTrace(read_trace(words.files[0], known["tokens_per_id"], known["limit"]))
    sides: dict[int, Side] = {}
    with progress_bar("compare", len(points)) as advance:
        for place, result in at_once(replayed, points, trace, jobs):
            labels = points[place].labels
            name = " ".join(f"{option} {labels[option]}" for option in varying if option in labels)
            sides[place] = name, result
            advance()
    return [sides[place] for place in range(len(points))]


def _short(name: str) -> str:
    return pathlib.Path(name).name if name.endswith(".json") else name


def _document(result: CompareResult) -> dict[str, Any]:
    tables = {
        name: {column: values.tolist() for column, values in getattr(result, name).items()}
        for name in ("totals", "causes", "requests")
    }
    return {"replays": list(result.names), **tables, "changes": [dataclasses.asdict(each) for each in result.changes]}


def _print(result: CompareResult, sides: Sequence[Side], most: int) -> None:
    out = console()
    for each in _tables(result):
        out.print(each)
    for line in _changes(result, sides, most):
        out.print(line, highlight=False)


def _tables(result: CompareResult) -> Iterator[Table]:
    """Totals, and prompt tokens by cause; one column a replay."""
    totals = {
        total.replace("_", " "): [_shown(total, each) for each in result.totals[total].tolist()] for total in TOTALS
    }
    tokens = {cause: result.causes[cause].tolist() for cause in ("hit", *CAUSES)}
    causes = {cause: [f"{each:,}" for each in row] for cause, row in tokens.items() if any(row)}
    for title, rows in (("Totals", totals), ("Prompt tokens", causes)):
        made = table("", title=title)
        for name in result.names:
            made.add_column(_short(name), justify="right")
        for name, row in rows.items():
            made.add_row(name, *row)
        yield made


def _shown(total: str, value: float) -> str:
    if value < 0:
        return "not counted"
    return f"{value:.2%}" if total == "hit_rate" else f"{int(value):,}"


def _changes(result: CompareResult, sides: Sequence[Side], most: int) -> Iterator[str]:
    """A paragraph a replay: how its hits differ from the first one's."""
    name, first = sides[0]
    for change, (_, other) in zip(result.changes, sides[1:], strict=True):
        yield f"{_short(change.name)} against {_short(name)}:"
        if not change.longer and not change.shorter:
            yield "  every hit is the same"
        if change.longer:
            gained = f"{counted(change.longer, 'request')} hit {change.gained:,} tokens more"
            yield f"  {gained}: {_causes(change.gained_from)}"
        if change.shorter:
            lost = f"{counted(change.shorter, 'request')} hit {change.lost:,} tokens less"
            yield f"  {lost}: {_causes(change.lost_to)}"
        if change.other:
            yield f"  {counted(change.other, 'request')}, admitted by one of the two only"
        for index in most_changed(result, change.name, most):
            hits = " -> ".join(f"{int(each.requests['hit'][index]):,}" for each in (first, other))
            moved = {
                cause: tokens
                for cause in CAUSES
                if (tokens := int(other.requests[cause][index] - first.requests[cause][index]))
            }
            yield f"  request {index}: {hits} of {int(result.requests['prompt'][index]):,}; {_causes(moved, sign='+')}"


def _causes(tokens: dict[str, int] | Any, sign: str = "") -> str:
    found = sorted(tokens.items(), key=lambda pair: -abs(pair[1]))
    return ", ".join(f"{cause} {count:{sign},}" for cause, count in found)

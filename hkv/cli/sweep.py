"""`hkv sweep`: a trace replayed with every combination of some options."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import click
from rich.table import Table

from hkv.cli.html import html_field, write_data
from hkv.cli.options import command_of
from hkv.cli.output_option import OutputPath, Reported, console, plot_field, table, talks, write_json, write_output
from hkv.cli.progress import progress_bar
from hkv.cli.replay import parsed, points_of
from hkv.contract.options import Number, argument, check_plot_path, option
from hkv.limits import MAX_WORKERS, counted, show_bytes
from hkv.replay import pages, plot, sweep
from hkv.replay.swept import answers, described, swept, warned
from hkv.replay.traces.interned import InternedTrace
from hkv.replay.traces.reader import read_trace

TIERS = ("host memory", "chunks")
"""Units of a second tier's size."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SweepOptions(Reported):
    replayed: tuple[str, ...] = argument(
        nargs=-1, required=True, type=click.UNPROCESSED, metavar="TRACE [OPTIONS OF REPLAY]"
    )
    jobs: int | None = option(
        type=click.IntRange(1, MAX_WORKERS), help="Points replayed at once.  [default: processors]"
    )
    ray: str | None = option(
        metavar="ADDRESS", help="Have a Ray cluster replay: auto, local, HOST:PORT.  [default: processes here]"
    )
    target: tuple[float, ...] = option(
        (), type=Number(0, 100), help="Say from which size on this percentage of the prompts is hit."
    )
    results: str | None = option(
        metavar="FILE",
        type=click.Path(dir_okay=False),
        help="JSON lines, one a point, written as they come; points that stand there already are not replayed again.",
    )
    bounds: bool = option(
        False,
        help="Also find what a pool that evicts nothing hits, and the most that any choice of what to keep could.",
    )
    csv_path: str | None = option(None, "--csv", metavar="FILE", type=OutputPath(), help="Write the points as CSV.")
    plot_path: str | None = plot_field("Draw hit rates against sizes; .png or .svg.")
    cost_ratio: float | None = option(
        type=Number(0, 1e6, min_open=True),
        help="With --plot over the sizes of two tiers: lines of equal cost, if so much of the second costs as much as "
        "one of the first on each GPU.",
    )
    html: str | None = html_field("hit rates against sizes, with the bounds that were found")


@command_of("sweep", _SweepOptions, context_settings={"ignore_unknown_options": True})
def command(given: _SweepOptions) -> None:
    """Replay a trace with every combination of some options.

    Every option of `hkv replay` may be given; these may have several values between commas: --model, --memory,
    --block-size, --kv-dtype, --tp, --dialect, --draft, --lookahead, --step-tokens, --decode-tokens,
    --max-running, --closed-loop, and those that a dialect adds; and these between semicolons: --groups, --num-blocks,
    --eagle. --memory and --num-blocks also take LOW..HIGH:N, N sizes in equal ratios. Each point is what `hkv replay`
    finds with its options. One size of the pool beside several of --offload: a row a size of the second tier, 0 for
    none.

    \b
    Example:
      hkv sweep chat.jsonl --groups full:16,swa:16:1024 --num-blocks 1000..20000:6 --retention dense,0 --target 50
      hkv sweep chat.jsonl --model gemma-3-1b/config.json --memory 1GiB..16GiB:5 --plot memory.png
    """
    csv_path, plot_path, json_path = given.csv_path, given.plot_path, given.json_path
    if plot_path:
        check_plot_path(plot_path)
    if given.jobs is not None and given.ray is not None:
        raise click.UsageError("--jobs counts what runs here; with --ray the cluster says how many there are")
    words = parsed(given.replayed)
    if len(words.files) != 1:
        raise click.UsageError(f"one TRACE is wanted, not {len(words.files)}")
    given_options = {*words.axes, *(each[0] for each in words.fixed)}
    if (sweep.MEMORY in given_options) == (sweep.BLOCKS in given_options):
        raise click.UsageError("either --memory, with --model, or --num-blocks, with --groups, is wanted")
    points, path = points_of(words), words.files[0]
    over_both = plot_path and plot.over_both([{"options": point.labels} for point in points])
    if given.cost_ratio is not None and not over_both:
        raise click.UsageError("--cost-ratio is for --plot over several sizes of each of two tiers, and nothing else")
    known = points[0].options
    trace = InternedTrace(read_trace(path, known["tokens_per_id"], known["limit"]))
    warnings = warned(points, trace)
    for text, labels in warnings.items():
        print(f"hkv: warning: {labels}: {text}", file=sys.stderr)
    how: dict[str, Any] = {"jobs": given.jobs or os.cpu_count() or 1, "ray": given.ray, "results": given.results}
    with progress_bar("sweep", len(points)) as advance:
        rows, infinite = swept(points, trace, with_bounds=given.bounds, progress=advance, **how)
    said = described(points)
    found = [{**each, **said[each["line"]]} for each in answers(rows, infinite, given.target)]
    if csv_path:
        write_output(csv_path, sweep.as_csv(rows))
    if plot_path:
        how = {"infinite": infinite, "cost_ratio": given.cost_ratio, "size": found[0]["size"]}
        write_output(plot_path, plot.drawn_sweep(rows, plot_path, pathlib.Path(path).name, **how))
    if given.html:
        sentences = [list(_sentences(each)) for each in found]
        write_data(given.html, pages.sweep_data(found, sentences, f"hkv sweep: {pathlib.Path(path).name}"))
    write_json(json_path, {"trace": path, "lines": found, "warnings": warnings})
    if talks(csv_path, plot_path, given.html, json_path):
        _print(found)


def _shown(row: sweep.Row, name: str) -> str:
    size = sweep.size_of(row["options"])
    if not size:
        return "no second tier"
    return {
        "memory": show_bytes(size),
        "host memory": f"{show_bytes(size)} of host memory",
        "chunks": f"{counted(int(size), 'chunk')} in the second tier",
    }.get(name, f"{int(size):,} blocks")


def _print(found: list[dict[str, Any]]) -> None:
    """A table for each line, and what follows from it."""
    out = console()
    for answer in found:
        out.print(_table(answer))
        if answer["resolved"]:
            last = "last row " if answer["size"] == "host memory" else ""
            out.print(f"{last}as {answer['resolved']}", highlight=False)
        for sentence in _sentences(answer):
            out.print(sentence, highlight=False)


def _table(answer: Mapping[str, Any]) -> Table:
    bounded, tiered = (any(name in row for row in answer["points"]) for name in (sweep.OPTIMAL, "loaded_tokens"))
    rows = []
    for row in answer["points"]:
        columns = ["" if row["evictions"] is None else f"{row['evictions']:,}"]
        best = sweep.optimal_rate(row) if bounded else 0.0
        if tiered:
            share = row["loaded_tokens"] / max(row["prompt_tokens"], 1)
            columns[:0] = [f"{share:.2%}", f"{row['tier_stored']:,}", f"{row['tier_stored'] - row['tier_read']:,}"]
            columns[:0] = [f"{best:.2%}"] * bounded
        else:
            columns += [f"{row['preemptions']:,}", f"{sweep.refused(row):,}"]
            columns[:0] = [f"{best:.2%}", f"{best - row['hit_rate']:.2%}"] * bounded
        size = sweep.size_of(row["options"])
        shown = show_bytes(size) if "memory" in answer["size"] else f"{int(size):,}"
        rows.append((shown if size else "none", f"{row['hit_rate']:.2%}", *columns))
    size = answer["size"]
    if tiered:
        names = f">{size}|>hit rate|{'>optimal|' * bounded}>in tier|>stored|>unread|>evictions"
    else:
        names = f">{size}|>hit rate|{'>optimal|>gap|' * bounded}>evictions|>preemptions|>refused"
    blocks = f", {answer['points'][0]['blocks']:,} blocks on the GPU" if size in TIERS else ""
    return table(names, rows, title=(answer["line"] or "Sweep") + blocks)


def _sentences(answer: Mapping[str, Any]) -> Iterator[str]:
    best, bend, infinite, size = (answer[name] for name in ("highest", "knee", "infinite", "size"))
    lost = f", {counted(sweep.refused(best), 'request')} refused" if sweep.refused(best) else ""
    yield f"highest: {best['hit_rate']:.2%}, with {_shown(best, size)}{lost}"
    for row in answer["points"]:
        if not sweep.size_of(row["options"]):
            yield f"no second tier: {row['hit_rate']:.2%}"
    if infinite is not None:
        still = f", with {infinite['evictions']:,} evictions still" if infinite["evictions"] else ""
        yield f"infinite: {infinite['hit_rate']:.2%}{still}"
    if bend is not None:
        yield f"knee: {_shown(bend, size)}, {bend['hit_rate']:.2%}"
    for target, row in answer["reached"].items():
        from_on = "not reached" if row is None else f"from {_shown(row, size)} on ({row['hit_rate']:.2%})"
        yield f"{target}: {from_on}"

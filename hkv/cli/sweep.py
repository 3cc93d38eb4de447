"""`hkv sweep`: a trace replayed with every combination of some options."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import multiprocessing
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from hkv.byte_size import show_bytes
from hkv.cli import replay as single
from hkv.cli.json_output import json_option, write_json
from hkv.cli.numbers import Number
from hkv.cli.output_option import OutputPath, talks, write_output
from hkv.cli.progress import progress_bar
from hkv.errors import FileError
from hkv.limits import MAX_WORKERS
from hkv.machine import native_loops
from hkv.plot_path import check_plot_path
from hkv.replay import summary, sweep, sweep_plot
from hkv.replay.run import default_engine, replay
from hkv.replay.traces.reader import TraceRequest, read_trace

NOT_SWEPT = ("--json", "--plot", "--check", "--ceilings")
"""Options of `hkv replay` that say nothing to a sweep."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One point of a sweep.

    Attributes:
      options: those that vary.
      arguments: of `hkv replay`.
      room: blocks that its compiled program has room for, so that the points of a line share one.
    """

    options: Mapping[str, str]
    arguments: Sequence[str]
    room: int = 0


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("replayed", nargs=-1, required=True, type=click.UNPROCESSED, metavar="TRACE [OPTIONS OF REPLAY]")
@click.option("--jobs", type=click.IntRange(1, MAX_WORKERS), help="Processes that replay.  [default: one a processor]")
@click.option(
    "--target", type=Number(0, 100), multiple=True, help="Say from which size on this percentage of the prompts is hit."
)
@click.option(
    "--results",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="JSON lines, one a point, written as they come; points that stand there already are not replayed again.",
)
@click.option("--csv", "csv_path", metavar="FILE", type=OutputPath(), help="Write the points as CSV.")
@click.option(
    "--plot", "plot_path", metavar="FILE", type=OutputPath(), help="Draw hit rates against sizes; .png or .svg."
)
@json_option
def command(
    replayed: tuple[str, ...],
    jobs: int | None,
    target: tuple[float, ...],
    results: str | None,
    csv_path: str | None,
    plot_path: str | None,
    json_path: str | None,
) -> None:
    """Replay a trace with every combination of some options.

    Every option of `hkv replay` may be given; these may have several values between commas: --model, --memory,
    --block-size, --kv-dtype, --tp, --retention, --dialect, --draft, --lookahead, --step-tokens, --decode-tokens,
    --max-running, --linear-step, --reserve-ratio, --closed-loop; and these between semicolons: --groups, --num-blocks,
    --eagle. --memory and --num-blocks also take LOW..HIGH:N, N sizes in equal ratios. Each point is what `hkv replay`
    finds with its options.

    \b
    Example:
      hkv sweep chat.jsonl --groups full:16,swa:16:1024 --num-blocks 1000..20000:6 --retention dense,0 --target 50
      hkv sweep chat.jsonl --model gemma-3-1b/config.json --memory 1GiB..16GiB:5 --plot memory.png
    """
    if plot_path:
        check_plot_path(plot_path)
    trace, axes, fixed = _parsed(replayed)
    tasks = [Task(options, [trace, *fixed, *_typed(options)]) for options in sweep.points(axes)]
    with _context(tasks[0].arguments) as context:
        requests = list(read_trace(trace, context.params["tokens_per_id"], context.params["limit"]))
    tasks = _with_room(tasks)
    rows = _rows(tasks, requests, jobs or os.cpu_count() or 1, results)
    answers = _answers(rows, target)
    if csv_path:
        write_output(csv_path, sweep.as_csv(rows))
    if plot_path:
        write_output(plot_path, sweep_plot.drawn(rows, plot_path, f"{pathlib.Path(trace).name}"))
    write_json(json_path, {"trace": trace, "lines": answers})
    if talks(csv_path, plot_path, json_path):
        _print(answers)


def _parsed(replayed: Sequence[str]) -> tuple[str, dict[str, list[str]], list[str]]:
    """The trace, the options that have a size or several values, with these, and all other arguments."""
    known = {name: each for each in single.command.params for name in (*each.opts, *each.secondary_opts)}
    axes: dict[str, list[str]] = {}
    traces, fixed = [], []
    words = iter(replayed)
    for word in words:
        option, equals, text = word.partition("=")
        if not word.startswith("-") or word == "-":
            traces.append(word)
            continue
        found = known.get(option)
        if found is None or option in NOT_SWEPT:
            raise click.UsageError(f"{option}: no option of hkv sweep, or of hkv replay that a sweep takes")
        if not isinstance(found, click.Option) or found.is_flag:
            fixed.append(word)
            continue
        if not equals:
            text = next(words, "")
        option = next((name for name in found.opts if name in sweep.SPLIT), option)
        several = sweep.values(option, text) if option in sweep.SPLIT else [text]
        if len(several) > 1 or option in (sweep.MEMORY, sweep.BLOCKS):
            axes[option] = several
        else:
            fixed += [option, text]
    if len(traces) != 1:
        raise click.UsageError(f"one TRACE is wanted, not {len(traces)}")
    if (sweep.MEMORY in axes) == (sweep.BLOCKS in axes):
        raise click.UsageError("either --memory, with --model, or --num-blocks, with --groups, is wanted")
    return traces[0], axes, fixed


def _typed(options: Mapping[str, str]) -> Iterator[str]:
    for name, value in options.items():
        yield from (name, value)


def _context(arguments: Sequence[str]) -> click.Context:
    """The context of `hkv replay` with these arguments.

    Raises:
      click.UsageError: it takes them not.
    """
    return single.command.make_context("sweep", list(arguments))


def _with_room(tasks: Sequence[Task]) -> list[Task]:
    """The tasks, those that differ in size alone with room for the largest; each was looked at, and is no error."""
    most: dict[str, int] = {}
    names = []
    for task in tasks:
        with _context(task.arguments) as context:
            blocks = single.prepared(context.params).cache.blocks + 1
        names.append(next(iter(sweep.lines([{"options": task.options}]))))
        most[names[-1]] = max(most.get(names[-1], 0), blocks)
    return [dataclasses.replace(task, room=most[name]) for task, name in zip(tasks, names, strict=True)]


def _rows(tasks: Sequence[Task], requests: list[TraceRequest], jobs: int, results: str | None) -> list[sweep.Row]:
    """The rows of all tasks in their order, those of an earlier run read."""
    digest = hashlib.sha256(msgspec.json.encode(requests)).hexdigest()[:16]
    keys = [hashlib.sha256(msgspec.json.encode([digest, *task.arguments[1:]])).hexdigest()[:16] for task in tasks]
    done = _earlier(results)
    left = [(key, task) for key, task in zip(keys, tasks, strict=True) if key not in done]
    with progress_bar("sweep", len(tasks)) as advance:
        for _ in range(len(tasks) - len(left)):
            advance()
        for key, row in _computed(left, requests, min(jobs, max(1, len(left)))):
            done[key] = row
            if results is not None:
                with open(results, "ab") as file:
                    file.write(msgspec.json.encode({"key": key, **row}) + b"\n")
            advance()
    return [{**done[key], "options": dict(task.options)} for key, task in zip(keys, tasks, strict=True)]


def _earlier(results: str | None) -> dict[str, sweep.Row]:
    """Rows of an earlier run by their keys; a last line that was cut off is passed over."""
    done: dict[str, sweep.Row] = {}
    if results is None or not os.path.exists(results):
        return done
    with open(results, "rb") as file:
        lines = file.read().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = msgspec.json.decode(line, type=dict[str, Any])
            done[row.pop("key")] = row
        except (msgspec.MsgspecError, KeyError, UnicodeDecodeError) as error:
            raise FileError(results, number, "", line[:60].decode("utf-8", "replace"), f"a point ({error})") from None
    if lines[-1]:
        raise FileError(results, len(lines), "", lines[-1][:60].decode("utf-8", "replace"), "a whole line")
    return done


def _computed(
    left: Sequence[tuple[str, Task]], requests: list[TraceRequest], jobs: int
) -> Iterator[tuple[str, sweep.Row]]:
    """Rows with their keys, as they come."""
    if jobs == 1:
        for key, task in left:
            yield key, _row(task, requests)
        return
    spawned = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, spawned, native_loops.enable) as pool:
        waiting = {pool.submit(_row, task, requests): key for key, task in left}
        try:
            for future in concurrent.futures.as_completed(waiting):
                yield waiting[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _row(task: Task, requests: list[TraceRequest]) -> sweep.Row:
    """One replay, as `hkv replay` with the task's arguments."""
    with _context(task.arguments) as context:
        options = context.params
        studied, timing = single.prepared(options), single.timing_of(options)
        studied.cache.room = task.room
        engine = options["engine"]
        if context.get_parameter_source("engine") is click.core.ParameterSource.DEFAULT:
            engine = default_engine(studied.cache)[0]
        outcome = replay(requests, studied.cache, studied.schedule, timing, engine=engine)
    totals = summary.totals(outcome)
    return {"options": dict(task.options), **{name: totals[name] for name in sweep.COLUMNS}}


def _answers(rows: Sequence[sweep.Row], targets: Sequence[float]) -> list[dict[str, Any]]:
    """Of each line its knee, its highest rate, and the smallest pools that reach the targets."""
    answers = []
    for name, line in sweep.lines(rows).items():
        bend, best = sweep.knee(line), max(line, key=lambda row: row["hit_rate"])
        reached = {f"{target:g}%": sweep.first_reaching(line, target / 100) for target in targets}
        answers.append({"line": name, "points": line, "knee": bend, "highest": best, "reached": reached})
    return answers


def _shown(row: sweep.Row) -> str:
    options = row["options"]
    if sweep.MEMORY in options:
        return show_bytes(sweep.size_of(options))
    return f"{int(sweep.size_of(options)):,} blocks"


def _print(answers: Sequence[Mapping[str, Any]]) -> None:
    """A table for each line, and what follows from it."""
    console = Console()
    for answer in answers:
        table = Table(title=answer["line"] or "Sweep", title_justify="left")
        for name in ("pool", "hit rate", "evictions", "preemptions", "never fits"):
            table.add_column(name, justify="right")
        for row in answer["points"]:
            evictions = "" if row["evictions"] is None else f"{row['evictions']:,}"
            table.add_row(
                _shown(row), f"{row['hit_rate']:.2%}", evictions, f"{row['preemptions']:,}", f"{row['never_fit']:,}"
            )
        console.print(table)
        for sentence in _sentences(answer):
            console.print(sentence, highlight=False)


def _sentences(answer: Mapping[str, Any]) -> Iterator[str]:
    best, bend = answer["highest"], answer["knee"]
    yield f"highest: {best['hit_rate']:.2%}, with {_shown(best)}"
    if bend is not None:
        yield f"knee: {_shown(bend)}, {bend['hit_rate']:.2%}"
    for target, row in answer["reached"].items():
        yield f"{target}: not reached" if row is None else f"{target}: from {_shown(row)} on ({row['hit_rate']:.2%})"

"""`hkv replay`: a request trace through a hybrid cache."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import click
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table

from hkv.cli.html import html_field, write_data
from hkv.cli.options import command_of, commands, is_given, own_options, refuse_others
from hkv.cli.output_option import OutputPath, Reported, console, plot_field, table, talks, write_json, write_output
from hkv.cli.progress import interruption, progress_bar
from hkv.contract import registry
from hkv.contract.options import argument, check_plot_path, group, option
from hkv.files import shown
from hkv.limits import counted
from hkv.replay import pages, plot, result, sweep
from hkv.replay.agreement import Difference
from hkv.replay.attribution import TRACE, Missed
from hkv.replay.command import CacheOptions, ReplayCommand, ScheduleOptions, StudiedCache
from hkv.replay.observed import EVICTED
from hkv.replay.result import Ceiling, advice, ceilings, document
from hkv.replay.run import Outcome, Timing, default_engine, replay
from hkv.replay.schedule import Schedule
from hkv.replay.swept import Point
from hkv.replay.traces.interned import InternedTrace
from hkv.replay.traces.reader import read_trace

DIFFERENT = 1
"""Exit status when `--check` finds a difference."""

COMMANDS = commands(lambda dialect: dialect.replay_command())
"""Additions to the command of every dialect that replays traces."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ReplayOptions(Reported):
    trace: str = argument(type=click.Path(exists=True, dir_okay=False, allow_dash=True))
    cache: CacheOptions = group(CacheOptions)
    own: Mapping[str, Any] = own_options(COMMANDS)
    schedule: ScheduleOptions = group(ScheduleOptions)
    ceilings: bool = option(False, help="Replay again with one cause of misses removed at a time.")
    plot_path: str | None = plot_field(
        "Draw hit rate and occupancy over time; .png or .svg, - for SVG on standard output."
    )
    html: str | None = html_field("hits, causes and blocks over time, and why each request's hit ended")
    perfetto: str | None = option(
        metavar="FILE", type=OutputPath(), help="Write a trace of requests, groups, pool and steps for Perfetto, JSON."
    )


@command_of("replay", _ReplayOptions)
def command(given: _ReplayOptions) -> int:
    """Replay a request trace through a hybrid cache.

    Requests arrive, wait, are computed in chunks, grow as they generate and give their blocks back, as the engine's
    scheduler would have it. TRACE has one JSON object a line: `timestamp`, `input_length`, `output_length`,
    `hash_ids` (Mooncake's format), or `timestamp`, `tokens`, `output_length` or `output_tokens`; `hkv trace import`
    makes one from other formats. It may be compressed (gzip, Zstandard), a pipe, or `-` for standard input.

    \b
    Example:
      hkv trace chat -o chat.jsonl --requests 500 --tokens-per-id 16
      hkv replay chat.jsonl --groups full:16,swa:16:1024,swa:16:128 --num-blocks 20000 --plot chat.png
      hkv replay chat.jsonl --model gemma-3-1b/config.json --memory 2GiB
      hkv replay chat.jsonl --dialect rtp-llm/hybrid --groups full:64,mamba:64 --num-blocks 5000
    """
    options = click.get_current_context().params
    studied, timing = prepared(options), timing_of(options)
    engine = given.cache.engine
    if not is_given("engine"):
        engine, reason = default_engine(studied.cache)
        if reason:
            print(f"hkv: engine {engine}: {reason}", file=sys.stderr)
    if given.plot_path:
        check_plot_path(given.plot_path)
    trace = InternedTrace(read_trace(given.trace, given.schedule.tokens_per_id, given.schedule.limit))
    total = len(trace.requests)
    warned = studied.warnings(trace)
    for text in warned:
        print(f"hkv: warning: {text}", file=sys.stderr)
    counted = _Counted()

    def stopped() -> None:
        if talks(given.json_path, given.plot_path, given.html, given.perfetto):
            click.echo(f"stopped after {counted.requests:,} of {total:,} requests")

    how: dict[str, Any] = {"check": given.cache.check, "warmup": given.schedule.warmup, "progress": counted}
    sampled = bool(given.plot_path or given.json_path or given.html or given.perfetto)
    try:
        with interruption().saying(stopped), progress_bar("replay", total) as advance:
            counted.advance = advance
            outcome = replay(trace, studied.cache, studied.schedule, timing, engine=engine, sampled=sampled, **how)
            others = ceilings(trace, outcome, studied.schedule, timing, engine) if given.ceilings else ()
    except Difference as difference:
        print(f"hkv: the engines disagree: {difference}", file=sys.stderr)
        return DIFFERENT
    _report(outcome, others, studied, given, {**options, "engine": engine}, warned)
    return 0


def prepared(options: dict[str, Any]) -> StudiedCache:
    """The cache that the options of the command that runs ask for."""
    rules = registry.dialect_of(options["dialect"]).replay_command()
    refuse_others(rules, COMMANDS, options["dialect"])
    return rules.studied(options)


def timing_of(options: dict[str, Any]) -> Timing:
    """The timing that they ask for."""
    return Timing(step_ms=options["step_ms"], speed=Fraction(options["speed"]))


class _Counted:
    """Counts requests, and moves a bar."""

    def __init__(self) -> None:
        self.requests = 0
        self.advance: Callable[[], None] = lambda: None

    def __call__(self) -> None:
        self.requests += 1
        self.advance()


def _report(
    outcome: Outcome,
    others: Sequence[Ceiling],
    studied: StudiedCache,
    given: _ReplayOptions,
    options: dict[str, Any],
    warned: Sequence[str],
) -> None:
    engine, plot_path, json_path = options["engine"], given.plot_path, given.json_path
    title = f"{pathlib.Path(shown(given.trace)).name}: {studied.name}, engine {engine}"
    if given.html:
        name = pathlib.Path(shown(given.trace)).name
        data = pages.replay_data(outcome, engine, title, f"hkv replay: {name}", given.schedule.step_ms, others)
        write_data(given.html, data)
    if given.perfetto:
        write_output(given.perfetto, pages.perfetto(outcome, engine, given.schedule.step_ms))
    if plot_path:
        write_output(plot_path, plot.drawn(outcome, plot_path, given.schedule.step_ms, title))
    if json_path:
        found = document(outcome, engine, _written(options, studied.schedule), others)
        write_json(json_path, {**found, "resolved": studied.resolved, "warnings": list(warned)})
    if not talks(json_path, plot_path, given.html, given.perfetto):
        return
    out = console()
    if studied.remark:
        out.print(studied.remark, highlight=False)
    if studied.resolved:
        out.print(f"as {studied.resolved}", highlight=False)
    for renderable in _tables(outcome, engine, others):
        out.print(renderable, highlight=False)


WRITTEN_TO = ("json_path", "plot_path", "html", "perfetto")
"""Options that say where results go."""


def _written(options: Mapping[str, Any], schedule: Schedule) -> dict[str, Any]:
    """The options as the command line would take them, defaults as they came to be; where results go is left out.

    A type that reads something else than its text says how it is written (`written`).
    """
    plain = {name: value for name, value in options.items() if name not in WRITTEN_TO}
    for parameter in command.params:
        if written := getattr(parameter.type, "written", None):
            plain[parameter.name or ""] = written(options[parameter.name or ""])
    return plain | {name: getattr(schedule, name) for name in ("step_tokens", "max_running", "max_model_len")}


# A replay's outcome as tables for a terminal.

BARS = "▁▂▃▄▅▆▇█"

UNBOUNDED = 10_000
"""Columns that are enough for any table."""


def _tables(outcome: Outcome, engine: str, ceilings: Sequence[Ceiling] = ()) -> Iterator[RenderableType]:
    """The totals, why prompts were no hits, and blocks in use over time."""
    yield _totals(outcome, engine)
    yield _reasons(outcome, engine)
    if outcome.trace is not None:
        yield _missed(outcome)
        yield "".join(f"- {sentence}\n" for sentence in advice(outcome, ceilings))
    yield _occupancy(outcome)


def _totals(outcome: Outcome, engine: str) -> Table:
    totals = result.totals(outcome)
    waited = counted(totals["wait_steps_median"], "step")
    rows: list[tuple[str, Any, str]] = [
        ("requests", totals["requests"], f"{totals['finished']:,} finished"),
        ("prompt tokens", totals["prompt_tokens"], ""),
        ("hit tokens", totals["hit_tokens"], ""),
        ("hit rate", f"{totals['hit_rate']:.2%}", _counted(outcome)),
        ("output tokens", totals["output_tokens"], ""),
        ("blocks in use, peak", totals["blocks_in_use_peak"], f"of {totals['blocks']:,}"),
        ("blocks in use, median", totals["blocks_in_use_median"], "over steps with work"),
        ("evictions", _or_unavailable(totals["evictions"], engine), "cached blocks handed out again"),
        ("admissions put off", totals["put_off"], "steps in which the first waiting request did not fit"),
        ("preemptions", totals["preemptions"], _recovery(totals["recovered_tokens"], totals["recomputed_tokens"])),
        ("refused: never fits", totals["never_fit"], "too large for the whole pool"),
        ("refused: too long", totals["too_long"], f"over {outcome.max_model_len:,} tokens"),
        ("running, peak", totals["running_peak"], "requests"),
        ("waiting, peak", totals["waiting_peak"], f"requests; {waited} of wait, median"),
        ("steps", totals["steps_with_work"], f"with work, of {totals['steps']:,}"),
        ("wall time", f"{totals['seconds']:.1f} s", f"engine {engine}"),
    ]
    own = outcome.cache.rows(totals)
    rows[7:7] = [(what, _or_unavailable(value, engine), remark) for what, value, remark in own]
    shown = [(what, f"{value:,}" if isinstance(value, int) else value, remark) for what, value, remark in rows]
    return table("what|>value|remark", shown, title="Replay", show_header=False)


def _counted(outcome: Outcome) -> str:
    after = f", after {counted(outcome.warmup, 'request')}" if outcome.warmup else ""
    lost = result.totals(outcome)
    refused = ", those of refused requests too" if lost["never_fit"] or lost["too_long"] else ""
    return f"of prompt tokens, at first admission{after}{refused}"


def _or_unavailable(value: int | None, engine: str) -> int | str:
    return f"{result.UNAVAILABLE}: {engine}" if value is None else value


def _recovery(recovered: int, recomputed: int) -> str:
    return f"{recovered:,} of {recomputed:,} tokens found again" if recomputed else ""


def _reasons(outcome: Outcome, engine: str) -> RenderableType:
    if not outcome.cache.reasons:
        return "What groups lacked: under these rules nothing tells\n"
    groups = result.groups(outcome)
    if not groups or groups[0]["reasons"] is None:
        return f"What groups lacked: {result.UNAVAILABLE}: {engine} (add --check, or use --engine numpy)\n"
    return _Reasons(groups, outcome.cache.reasons)


def _missed(outcome: Outcome) -> Table:
    """Every prompt token: a hit, or the cause for which it was none."""
    totals, found = result.totals(outcome), outcome.missed
    names = outcome.cache.group_names
    prompt = max(totals["prompt_tokens"], 1)
    rows = [("hit", totals["hit_tokens"], "")]
    rows += [(cause, tokens, _remark(cause, outcome, found, names)) for cause, tokens in found.tokens.items() if tokens]
    shown = [(cause, f"{tokens:,}", f"{tokens / prompt:.2%}", remark) for cause, tokens, remark in rows]
    return table("=cause|>tokens|>share|remark", shown, title="Prompt tokens, and why they were no hits")


def _remark(cause: str, outcome: Outcome, found: Missed, names: Sequence[str]) -> str:
    """The group that lacked blocks for most of it; for evictions, by whose pressure."""
    assert outcome.trace is not None
    if cause == TRACE:
        size = outcome.trace.tokens_per_id
        return f"ids of {size:,} tokens do not say" if size else "the trace names no content"
    if cause == EVICTED and (most := found.most_evicted(names)):
        return f"most: {names[most.group]}, for {names[most.taker]}, {counted(most.steps, 'step')} before (median)"
    lacking = found.most_lacking(cause, names)
    return f"most: {lacking}" if lacking and len(names) > 1 else ""


class _Reasons:
    """Requests by reason and group: a column a group; where there is no room for that, a row a group."""

    def __init__(self, groups: Sequence[Mapping[str, Any]], reasons: Sequence[str]) -> None:
        self._groups = groups
        self._reasons = [reason for reason in reasons if any(group["reasons"][reason] for group in groups)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        title = "What each group lacked beyond the hits, requests"
        headings = [_heading(group) for group in self._groups]
        counts = [[f"{group['reasons'][reason]:,}" for reason in self._reasons] for group in self._groups]
        wide = table("=beyond the hit", title=title)
        for heading in headings:
            wide.add_column(heading, justify="right", no_wrap=True)
        for reason, *row in zip(self._reasons, *counts, strict=True):
            wide.add_row(reason, *row)
        if wide.__rich_measure__(console, options.update(max_width=UNBOUNDED)).maximum <= options.max_width:
            yield wide
            return
        rows = [(" ".join(heading.split("\n")), *row) for heading, row in zip(headings, counts, strict=True)]
        yield table("|".join(["=group", *(f">{reason}" for reason in self._reasons)]), rows, title=title)


def _heading(group: Mapping[str, Any]) -> str:
    layers = len(group["layers"])
    lines = [group["group"], f"{layers} layer{'s' * (layers > 1)}" if layers else "", "(eagle)" * group["eagle"]]
    return "\n".join(line for line in lines if line)


def _occupancy(outcome: Outcome, width: int = 60) -> str:
    steps = outcome.recorder.steps
    if not steps.step:
        return "Blocks in use over time: no step had work\n"
    line = sparkline(over_time(steps.step, steps.in_use, outcome.steps, width), outcome.cache.blocks)
    return f"Blocks in use over time, of {outcome.cache.blocks:,}:\n{line}\n"


def over_time(steps: Sequence[int], values: Sequence[int], end: int, bins: int) -> list[int]:
    """The largest value in each of `bins` equal stretches of the steps [0, end); 0 where no step had work."""
    bins = min(bins, end)
    largest = [0] * bins
    for step, value in zip(steps, values, strict=True):
        place = step * bins // end
        largest[place] = max(largest[place], value)
    return largest


def sparkline(values: Sequence[int], top: int) -> str:
    """One bar a value; a blank for 0, the full bar for `top`."""
    return "".join(" " if not value else BARS[min(len(BARS) - 1, value * len(BARS) // max(top, 1))] for value in values)


# Options of `hkv replay` with several values: the words of a command line, and the replays that they ask for.

NOT_VARIED = ("--json", "--plot", "--html", "--perfetto", "--check", "--ceilings")
"""Options of `hkv replay` that say nothing to several of them."""


@dataclasses.dataclass(frozen=True)
class Words:
    """A command line taken apart: what is no option, options of a size or of several values, and the others."""

    files: Sequence[str]
    axes: Mapping[str, Sequence[str]]
    fixed: Sequence[tuple[str, ...]]


def parsed(words: Sequence[str]) -> Words:
    """Takes a command line apart; UsageError for what is no option of `hkv replay`, or says nothing here."""
    known = {name: each for each in command.params for name in (*each.opts, *each.secondary_opts)}
    varied = {*sweep.SPLIT, *_names(*COMMANDS)}
    axes: dict[str, list[str]] = {}
    files: list[str] = []
    fixed: list[tuple[str, ...]] = []
    left = iter(words)
    for word in left:
        option, equals, text = word.partition("=")
        if not word.startswith("-") or word == "-":
            files.append(word)
            continue
        found = known.get(option)
        if found is None or option in NOT_VARIED:
            raise click.UsageError(f"{option}: no option of this command, or of hkv replay that it takes")
        if not isinstance(found, click.Option) or found.is_flag:
            fixed.append((word,))
            continue
        if not equals:
            text = next(left, "")
        option = next((name for name in found.opts if name in varied), option)
        several = sweep.values(option, text) if option in varied else [text]
        if len(several) > 1 or option in (sweep.MEMORY, sweep.BLOCKS):
            axes[option] = several
        else:
            fixed.append((option, text))
    told = sweep.told_apart(axes)
    fixed += [(option, several[0]) for option, several in axes.items() if option not in told]
    return Words(files, {option: axes[option] for option in told}, fixed)


def arguments_of(words: Words, labels: Mapping[str, str]) -> list[str]:
    """The arguments of one of the replays."""
    given = [*words.fixed, *labels.items()]
    return [*words.files[:1], *(word for each in given if _concerns(each[0], words, labels) for word in each)]


def _concerns(option: str, words: Words, labels: Mapping[str, str]) -> bool:
    """False, where dialects are held against each other, for an option that only others than this replay's have."""
    if len(words.axes.get("--dialect", ())) < 2 or option not in _names(*COMMANDS):
        return True
    return option in _names(registry.dialect_of(labels["--dialect"]).replay_command())


def _names(*commands: ReplayCommand) -> set[str]:
    """Options that dialects add to `hkv replay`."""
    return {name for command in commands for option in command.options() for name in option.opts}


def points_of(words: Words) -> list[Point]:
    """The replays that a command line asks for, each looked at and known to be no error."""
    asked = [
        {option: text for option, text in labels.items() if _concerns(option, words, labels)}
        for labels in sweep.points(words.axes)
    ]
    points: list[Point] = []
    for labels in (each for place, each in enumerate(asked) if each not in asked[:place]):
        with command.make_context("replay", arguments_of(words, labels)) as context:
            options: dict[str, Any] = context.params
            prepared(options)
            engine = options["engine"] if is_given("engine") else None
            timing, warmup = timing_of(options), options["warmup"]
            points.append(Point(labels=labels, options=options, timing=timing, engine=engine, warmup=warmup))
    return points

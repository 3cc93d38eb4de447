"""`hkv replay`: a request trace through a hybrid cache."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from hkv.cli.options import command_of, commands, is_given, own_options, refuse_others
from hkv.cli.output_option import Reported, console, plot_field, talks, write_json, write_output
from hkv.cli.progress import interruption, progress_bar
from hkv.contract import registry
from hkv.contract.options import argument, check_plot_path, group, option
from hkv.files import shown
from hkv.replay import plot, sweep
from hkv.replay.agreement import Difference
from hkv.replay.command import CacheOptions, ReplayCommand, ScheduleOptions, StudiedCache
from hkv.replay.result import Ceiling, ceilings, document
from hkv.replay.run import Outcome, Timing, default_engine, replay
from hkv.replay.schedule import Schedule
from hkv.replay.swept import Point
from hkv.replay.tables import tables
from hkv.replay.traces.interned import InternedTrace
from hkv.replay.traces.reader import read_trace

DIFFERENT = 1
"""Exit status when `--check` finds a difference."""

COMMANDS = commands(lambda dialect: dialect.replay_command())
"""Additions to the command of every dialect that replays traces."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options(Reported):
    trace: str = argument(type=click.Path(exists=True, dir_okay=False, allow_dash=True))
    cache: CacheOptions = group(CacheOptions)
    own: Mapping[str, Any] = own_options(COMMANDS)
    schedule: ScheduleOptions = group(ScheduleOptions)
    ceilings: bool = option(False, help="Replay again with one cause of misses removed at a time.")
    plot_path: str | None = plot_field(
        "Draw hit rate and occupancy over time; .png or .svg, - for SVG on standard output."
    )


@command_of("replay", _Options)
def command(given: _Options) -> int:
    """Replay a request trace through a hybrid cache.

    Requests arrive, wait, are computed in chunks, grow as they generate and give their blocks back, as the engine's
    scheduler would have it. TRACE has one JSON object a line: `timestamp`, `input_length`, `output_length`,
    `hash_ids` (Mooncake's format), or `timestamp`, `tokens`, `output_length` or `output_tokens`; `hkv trace import`
    makes one from other formats. It may be compressed (gzip, Zstandard), a pipe, or `-` for standard input.

    \b
    Example:
      hkv trace chat -o chat.jsonl --requests 500
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
    counted = _Counted()

    def stopped() -> None:
        if talks(given.json_path, given.plot_path):
            click.echo(f"stopped after {counted.requests:,} of {total:,} requests")

    how: dict[str, Any] = {"check": given.cache.check, "warmup": given.schedule.warmup, "progress": counted}
    sampled = bool(given.plot_path or given.json_path)
    try:
        with interruption().saying(stopped), progress_bar("replay", total) as advance:
            counted.advance = advance
            outcome = replay(trace, studied.cache, studied.schedule, timing, engine=engine, sampled=sampled, **how)
            others = ceilings(trace, outcome, studied.schedule, timing, engine) if given.ceilings else ()
    except Difference as difference:
        print(f"hkv: the engines disagree: {difference}", file=sys.stderr)
        return DIFFERENT
    _report(outcome, others, studied, given, {**options, "engine": engine})
    return 0


def prepared(options: dict[str, Any]) -> StudiedCache:
    """The cache that the options of the command that runs ask for."""
    rules = registry.dialect_of(options["dialect"]).replay_command()
    refuse_others(rules, COMMANDS, options["dialect"])
    return rules.studied(options)


def timing_of(options: dict[str, Any]) -> Timing:
    """The timing that they ask for."""
    return Timing(step_ms=options["step_ms"], speed=options["speed"])


class _Counted:
    """Counts requests, and moves a bar."""

    def __init__(self) -> None:
        self.requests = 0
        self.advance: Callable[[], None] = lambda: None

    def __call__(self) -> None:
        self.requests += 1
        self.advance()


def _report(
    outcome: Outcome, others: Sequence[Ceiling], studied: StudiedCache, given: _Options, options: dict[str, Any]
) -> None:
    engine, plot_path, json_path = options["engine"], given.plot_path, given.json_path
    if plot_path:
        title = f"{pathlib.Path(shown(given.trace)).name}: {studied.name}, engine {engine}"
        write_output(plot_path, plot.drawn(outcome, plot_path, given.schedule.step_ms, title))
    if json_path:
        found = document(outcome, engine, _written(options, studied.schedule), others)
        write_json(json_path, {**found, "resolved": studied.resolved})
    if not talks(json_path, plot_path):
        return
    out = console()
    if studied.remark:
        out.print(studied.remark, highlight=False)
    if studied.resolved:
        out.print(f"as {studied.resolved}", highlight=False)
    for renderable in tables(outcome, engine, others):
        out.print(renderable, highlight=False)


def _written(options: Mapping[str, Any], schedule: Schedule) -> dict[str, Any]:
    """The options as the command line would take them, defaults as they came to be; where results go is left out.

    A type that reads something else than its text says how it is written (`written`).
    """
    plain = {name: value for name, value in options.items() if name not in ("json_path", "plot_path")}
    for parameter in command.params:
        if written := getattr(parameter.type, "written", None):
            plain[parameter.name or ""] = written(options[parameter.name or ""])
    return plain | {name: getattr(schedule, name) for name in ("step_tokens", "max_running", "max_model_len")}


# Options of `hkv replay` with several values: the words of a command line, and the replays that they ask for.

NOT_VARIED = ("--json", "--plot", "--check", "--ceilings")
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
    return Words(files, axes, fixed)


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

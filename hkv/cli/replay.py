"""`hkv replay`: a request trace through a hybrid cache."""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console

from hkv.cli.engine_options import FORMS, dialect_option
from hkv.cli.output_option import OutputPath, json_option, talks, write_json, write_output
from hkv.cli.own_options import commands, own_options, refuse_others
from hkv.cli.progress import interruption, progress_bar
from hkv.contract import registry
from hkv.errors import ConfigError
from hkv.input_file import shown
from hkv.limits import (
    MAX_BLOCKS,
    MAX_COUNT,
    MAX_RANKS,
    MAX_SPECULATIVE_TOKENS,
    MAX_SPEED,
    MAX_STEP_MS,
    MAX_TOKENS,
    whole_number,
)
from hkv.plot_path import check_plot_path
from hkv.replay import plot
from hkv.replay.command import StudiedCache, groups_text
from hkv.replay.plain import Difference
from hkv.replay.result import document
from hkv.replay.run import COMPILED, Outcome, Timing, default_engine, replay
from hkv.replay.schedule import Schedule
from hkv.replay.summary import Ceiling, ceilings
from hkv.replay.tables import tables
from hkv.replay.traces.interned import InternedTrace
from hkv.replay.traces.reader import TOKENS_PER_ID, read_trace
from hkv.spec import LayerSpec, spec_from_text, text_forms

DIFFERENT = 1
"""Exit status when `--check` finds a difference."""


class Groups(click.ParamType):
    """Layers as `hkv.spec.text_forms` says them, several of them between commas."""

    name = "groups"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[LayerSpec]:
        return [spec_from_text(part.strip()) for part in value.split(",")]


class Blocks(click.ParamType):
    """A number of blocks, or several between commas."""

    name = "blocks"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        numbers = [whole_number(part.strip()) for part in value.split(",")]
        counts = [number for number in numbers if number is not None and 2 <= number <= MAX_BLOCKS]
        if len(counts) != len(numbers):
            raise ConfigError("num-blocks", value, f"an integer from 2 to {MAX_BLOCKS}, or several between commas")
        return tuple(counts)


class Positive(click.ParamType):
    """A positive number, exactly as written: 2, 0.5, 3/2."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Fraction:
        expected = f"a positive number, from 1/{MAX_SPEED} to {MAX_SPEED}"
        try:
            # Fraction would write 1e999999999 out digit by digit.
            number = Fraction(value) if re.fullmatch(r"[0-9./]{1,40}", value) else Fraction(0)
        except (ValueError, ZeroDivisionError):
            raise ConfigError("speed", value, expected) from None
        if not 1 / MAX_SPEED <= number <= MAX_SPEED:
            raise ConfigError("speed", value, expected)
        return number


COMMANDS = commands(lambda dialect: dialect.replay_command())
"""Additions to the command of every dialect that replays traces."""


@click.command()
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.option(
    "--groups",
    type=Groups(),
    help=f"The groups, between commas, each one of: {', '.join(text_forms())}.",
)
@click.option("--num-blocks", type=Blocks(), help="Blocks in the pool, the null block included.")
@click.option("--model", metavar="CONFIG", help="Instead of --groups: a model, named and planned as by `hkv plan`.")
@click.option("--memory", metavar="SIZE", help="With --model: memory for its cache on each GPU, such as 80GiB.")
@click.option("--tp", type=click.IntRange(1, MAX_RANKS), help="With --model: tensor-parallel ranks.  [default: 1]")
@click.option(
    "--block-size", type=click.IntRange(1, MAX_TOKENS), help="With --model: tokens per block, if not its kernels'."
)
@click.option("--kv-dtype", metavar="TYPE", help="With --model: element type of its cache.  [default: auto]")
@click.option("--engine", default=COMPILED, show_default=True, help=f"Whose cache, one of: {FORMS}.")
@click.option("--check", is_flag=True, help="Run the NumPy engine beside it and stop at the first difference (exit 1).")
@click.option("--caching/--no-caching", default=True, show_default=True, help="Prefix caching.")
@dialect_option
@own_options(COMMANDS)
@click.option(
    "--tokens-per-id",
    type=click.IntRange(1, MAX_TOKENS),
    help=f"Tokens that one of the trace's hash_ids stands for.  [default: as the trace says; {TOKENS_PER_ID}]",
)
@click.option("--limit", type=click.IntRange(1, MAX_COUNT), help="Replay the first LIMIT requests only.")
@click.option(
    "--step-ms", default=50, show_default=True, type=click.IntRange(1, MAX_STEP_MS), help="Milliseconds of a step."
)
@click.option(
    "--speed",
    default="1",
    show_default=True,
    type=Positive(),
    help="Arrivals come this many times faster than recorded.",
)
@click.option(
    "--step-tokens",
    type=click.IntRange(1, MAX_TOKENS),
    help=f"Most tokens computed in a step.  [default: {Schedule.step_tokens}, or the device's]",
)
@click.option(
    "--decode-tokens",
    default=2,
    show_default=True,
    type=click.IntRange(1, MAX_TOKENS),
    help="Tokens a running request generates in a step.",
)
@click.option(
    "--max-running",
    type=click.IntRange(1, MAX_COUNT),
    help=f"Most requests running at once.  [default: {Schedule.max_running}, or the device's]",
)
@click.option(
    "--max-model-len",
    metavar="N",
    help="Most tokens of prompt and output; longer requests are refused. With --model, `auto` is the most that fit.  "
    f"[default: {Schedule.max_model_len}; with --model, the model's]",
)
@click.option(
    "--lookahead",
    default=0,
    show_default=True,
    type=click.IntRange(0, MAX_SPECULATIVE_TOKENS),
    help="Slots allocated for draft tokens.",
)
@click.option(
    "--closed-loop",
    default=0,
    show_default=True,
    type=click.IntRange(0, MAX_COUNT),
    help="Keep N requests in the system, whatever the time stamps; 0: off.",
)
@click.option(
    "--warmup",
    metavar="N|P%",
    default="0",
    show_default=True,
    help="The first N requests, or P percent of them, do not count as prompts, hits or misses.",
)
@click.option("--ceilings", is_flag=True, help="Replay again with one cause of misses removed at a time.")
@json_option
@click.option(
    "--plot",
    "plot_path",
    metavar="FILE",
    type=OutputPath(),
    help="Draw hit rate and occupancy over time; .png or .svg, - for SVG on standard output.",
)
@click.pass_context
def command(ctx: click.Context, **options: Any) -> int:
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
    studied, timing = prepared(options), timing_of(options)
    if ctx.get_parameter_source("engine") is ParameterSource.DEFAULT:
        options["engine"], reason = default_engine(studied.cache)
        if reason:
            print(f"hkv: engine {options['engine']}: {reason}", file=sys.stderr)
    if options["plot_path"]:
        check_plot_path(options["plot_path"])
    trace = InternedTrace(read_trace(options["trace"], options["tokens_per_id"], options["limit"]))
    total = len(trace.requests)
    counted = _Counted()

    def stopped() -> None:
        if talks(options["json_path"], options["plot_path"]):
            click.echo(f"stopped after {counted.requests:,} of {total:,} requests")

    try:
        with interruption().saying(stopped), progress_bar("replay", total) as advance:
            counted.advance = advance
            outcome = _replay(trace, studied, timing, options, counted)
            others = (
                ceilings(trace, outcome, studied.schedule, timing, options["engine"]) if options["ceilings"] else ()
            )
    except Difference as difference:
        print(f"hkv: the engines disagree: {difference}", file=sys.stderr)
        return DIFFERENT
    _report(outcome, others, studied, options)
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


def _replay(
    trace: InternedTrace,
    studied: StudiedCache,
    timing: Timing,
    options: dict[str, Any],
    progress: Callable[[], None],
) -> Outcome:
    how: dict[str, Any] = {name: options[name] for name in ("engine", "check", "warmup")}
    how["sampled"] = bool(options["plot_path"] or options["json_path"])
    return replay(trace, studied.cache, studied.schedule, timing, progress=progress, **how)


def _report(outcome: Outcome, others: Sequence[Ceiling], studied: StudiedCache, options: dict[str, Any]) -> None:
    if options["plot_path"]:
        title = f"{pathlib.Path(shown(options['trace'])).name}: {studied.name}, engine {options['engine']}"
        write_output(options["plot_path"], plot.drawn(outcome, options["plot_path"], options["step_ms"], title))
    if options["json_path"]:
        found = document(outcome, options["engine"], _plain(options, studied.schedule), others)
        write_json(options["json_path"], {**found, "resolved": studied.resolved})
    if not talks(options["json_path"], options["plot_path"]):
        return
    console = Console(width=None if sys.stdout.isatty() else 110)
    if studied.remark:
        console.print(studied.remark, highlight=False)
    if studied.resolved:
        console.print(f"as {studied.resolved}", highlight=False)
    for renderable in tables(outcome, options["engine"], others):
        console.print(renderable, highlight=False)


def _plain(options: dict[str, Any], schedule: Schedule) -> dict[str, Any]:
    """The options as the command line would take them, defaults as they came to be; where results go is left out."""
    plain = {name: value for name, value in options.items() if name not in ("json_path", "plot_path")}
    plain["groups"] = None if options["groups"] is None else groups_text(options)
    plain |= {name: getattr(schedule, name) for name in ("step_tokens", "max_running", "max_model_len")}
    plain["num_blocks"] = ",".join(map(str, options["num_blocks"] or ())) or None
    plain["speed"] = str(options["speed"])
    for each in COMMANDS:
        plain |= each.written(options)
    return plain

"""`hkv explore`: every state that a small cache can reach, every invariant in each."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from hkv.cli.interruption import interruption
from hkv.cli.json_output import json_option, write_json
from hkv.cli.numbers import SECONDS, Number
from hkv.cli.output_option import STANDARD_OUTPUT, OutputPath, talks, write_output
from hkv.cli.replay import Groups
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.explorer import MOVES, Counterexample, Report, Space, explore
from hkv.dialects.vllm.explorer.defects import DEFECTS, planted
from hkv.dialects.vllm.explorer.search import CHUNK
from hkv.dialects.vllm.explorer.space import MOST
from hkv.dialects.vllm.explorer.transition import FORMS, default_form
from hkv.dialects.vllm.replay_command import EagleGroups, Retention
from hkv.errors import ConfigError
from hkv.limits import MAX_COUNT, MAX_LANES, MAX_WORKERS
from hkv.model.topology import Topology
from hkv.oracle.check import describe
from hkv.oracle.log_file import log_bytes
from hkv.spec import LayerSpec

BROKEN = 1
"""Exit status when an invariant is broken."""


@click.command("explore", epilog="Example: hkv explore --groups full:1,swa:1:2 --num-blocks 5 --max-model-len 2")
@click.option(
    "--groups", type=Groups(), default="full:1,swa:1:2", show_default=True, help="kind:block_size[:window],..."
)
@click.option(
    "--num-blocks",
    default=5,
    show_default=True,
    type=click.IntRange(2, MOST["num_blocks"]),
    help="Blocks, the null block included.",
)
@click.option(
    "--requests",
    default=2,
    show_default=True,
    type=click.IntRange(1, MOST["requests"]),
    help="Requests at the same time.",
)
@click.option(
    "--max-model-len",
    default=3,
    show_default=True,
    type=click.IntRange(1, MOST["max_model_len"]),
    help="Tokens of the longest request.",
)
@click.option(
    "--prompt",
    type=click.IntRange(1, MOST["max_model_len"]),
    help="Tokens of the longest prompt.  [default: the longest request]",
)
@click.option("--eagle", type=EagleGroups(), help="EAGLE drop rule, for these groups.")
@click.option("--retention", default="dense", type=Retention(), help="Tokens between retained boundaries; 0: none.")
@click.option("--watermark", default=0.0, show_default=True, type=Number(0, 1), help="Share that stays free.")
@click.option(
    "--without", multiple=True, type=click.Choice(tuple(MOVES)), help="Leave these operations out; repeatable."
)
@click.option("--plant", type=click.Choice(tuple(DEFECTS)), help="Plant this defect in the compiled cache first.")
@click.option("--limit-states", type=click.IntRange(1, MAX_COUNT), help="Stop at so many states.")
@click.option("--seconds", type=SECONDS, help="Stop after so many seconds.")
@click.option("--form", type=click.Choice(FORMS), help="How states are stepped together.  [default: by backend]")
@click.option(
    "--chunk", default=CHUNK, show_default=True, type=click.IntRange(1, MAX_LANES), help="States stepped at once."
)
@click.option(
    "--workers", default=2, show_default=True, type=click.IntRange(1, MAX_WORKERS), help="Dispatches at the same time."
)
@click.option(
    "--save",
    metavar="FILE",
    type=OutputPath(),
    help="Where a counterexample is saved; - for standard output.  [default: counterexample.jsonl]",
)
@json_option
@click.pass_context
def command(context: click.Context, json_path: str | None, save: str | None, plant: str | None, **options: Any) -> None:
    """Go breadth-first over all operation sequences of a small cache, and check every invariant in every state.

    States that differ only in what blocks and requests are called count once. Prompts and generated tokens are of two
    different tokens. The first broken invariant is shown with the shortest sequence of operations that breaks any,
    which is saved as a log for `hkv check`, `explain` and `shrink`, with the reference's answers.

    \b
    Operations that can be left out:
      cold    admissions that adopt nothing of what is cached
      parts   allocations for a part of the tokens that are left
      delay   allocations that register nothing, and the commit that does so later
      evict   single blocks that lose their keys
      reset   resets of the prefix cache
      drop    waiting requests that are forgotten

    Exit status: 0 no invariant is broken (whether everything was explored is said), 1 one is, 2 unusable input.
    """
    space = _space(options)
    path = save or "counterexample.jsonl"
    _check_folder(path)
    form = options["form"] or default_form()
    report = Report()

    def finish() -> None:
        found = report.counterexample
        if found is not None:
            write_output(path, log_bytes(found.header, *found.with_answers()))
        if talks(json_path, save):
            _show(report, options["groups"], path)
        write_json(json_path, _record(report, form, None if found is None else path))

    with interruption().saying(finish), _bar(options["limit_states"], options["seconds"]) as progress, planted(plant):
        explore(
            space,
            form=form,
            chunk=options["chunk"],
            workers=options["workers"],
            limit_states=options["limit_states"],
            seconds=options["seconds"],
            progress=progress,
            report=report,
        )
    finish()
    context.exit(0 if report.counterexample is None else BROKEN)


def _space(options: dict[str, Any]) -> Space:
    specs: list[LayerSpec] = options["groups"]
    sizes = [spec.block_size for spec in specs]
    cacheable = [spec.block_size for spec in specs if spec.prefix_cacheable]
    if not cacheable:
        raise ConfigError("groups", specs[0].kind, "at least one kind of layer whose blocks can be cached")
    eagle = options["eagle"]
    config = VllmConfig(
        topology=Topology.of_specs(specs, eagle or ()),
        num_blocks=options["num_blocks"],
        hash_block_size=math.gcd(*cacheable),
        scheduler_block_size=math.lcm(*sizes),
        max_model_len=options["max_model_len"],
        eagle=eagle is not None,
        retention_interval=options["retention"],
        watermark=options["watermark"],
    )
    prompt = options["max_model_len"] if options["prompt"] is None else options["prompt"]
    return Space(config=config, requests=options["requests"], prompt=prompt, without=frozenset(options["without"]))


def _check_folder(path: str) -> None:
    if path != STANDARD_OUTPUT and not pathlib.Path(path).parent.is_dir():
        raise ConfigError("save", path, "a file in a folder that exists")


@contextlib.contextmanager
def _bar(limit: int | None, seconds: float | None) -> Iterator[Any]:
    """Shows depth, states, transitions and what waits; the bar fills within a level."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("compiling", total=None)
        del limit, seconds

        def progress(report: Report, depth: int, share: float) -> None:
            rate = f"{report.rate(report.states):,.0f} states/s"
            text = f"depth {depth}: {report.states:,} states, {report.transitions:,} transitions, {rate}"
            bar.update(task, description=text, total=1.0, completed=share)

        yield progress


def _show(report: Report, specs: list[LayerSpec], path: str) -> None:
    if not report.seconds:
        click.echo("nothing explored: stopped while the program was being compiled")
        return
    click.echo(
        f"{report.states:,} states, {report.transitions:,} transitions, depth {report.depth}; "
        f"{report.seconds:.1f} s after {report.compiling:.1f} s of compiling: "
        f"{report.rate(report.states):,.0f} states/s, {report.rate(report.transitions):,.0f} transitions/s"
    )
    click.echo(
        f"{report.share(report.evictions):.1%} of the transitions evict, {report.share(report.refusals):.1%} refuse; "
        + ", ".join(f"{name} {count:,}" for name, count in report.by_operation.items())
    )
    found = report.counterexample
    if found is None:
        click.echo(
            "exhausted: no invariant is broken in any state" if report.exhausted else "not exhausted: stopped early"
        )
        return
    _show_counterexample(found, path)


def _show_counterexample(found: Counterexample, path: str) -> None:
    click.echo(f"broken: {', '.join(found.invariants)}, after {len(found.operations)} operations, and not after fewer:")
    for number, operation in enumerate(found.operations, 2):
        click.echo(f"  {number}: {describe(operation)}")
    click.echo(f"saved as {path}; its answers are the reference's")


def _record(report: Report, form: str, path: str | None) -> dict[str, Any]:
    fields = {field.name: getattr(report, field.name) for field in dataclasses.fields(report)}
    found = fields.pop("counterexample")
    return {
        **fields,
        "form": form,
        "states_per_second": report.rate(report.states),
        "share_of_evictions": report.share(report.evictions),
        "share_of_refusals": report.share(report.refusals),
        "counterexample": None
        if found is None
        else {
            "invariants": list(found.invariants),
            "operations": [describe(operation) for operation in found.operations],
            "log": path,
        },
    }

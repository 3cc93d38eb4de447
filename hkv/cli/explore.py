"""`hkv explore`: every state that a small cache can reach, every invariant in each."""

from __future__ import annotations

import pathlib
from typing import Any

import click

from hkv.cli.engine_options import dialect_option
from hkv.cli.numbers import SECONDS, Number
from hkv.cli.output_option import STANDARD_OUTPUT, OutputPath, json_option, talks, write_json, write_output
from hkv.cli.own_options import commands, own_options, refuse_others
from hkv.cli.progress import interruption, level_bar
from hkv.cli.replay import Groups
from hkv.contract import explore_command, registry
from hkv.contract.log import describe
from hkv.errors import ConfigError
from hkv.limits import MAX_COUNT
from hkv.oracle.exploration import explore_command_of, search_of
from hkv.oracle.log_file import log_bytes

BROKEN = 1
"""Exit status when an invariant is broken."""

COMMANDS = commands(explore_command_of)


@click.command("explore", epilog="Example: hkv explore --groups full:1,swa:1:2 --num-blocks 5 --max-model-len 2")
@click.option("--groups", type=Groups(), default="full:1,swa:1:2", show_default=True, help="As for `hkv replay`.")
@click.option("--watermark", default=0.0, show_default=True, type=Number(0, 1), help="Share that stays free.")
@own_options(COMMANDS)
@dialect_option
@click.option("--limit-states", type=click.IntRange(1, MAX_COUNT), help="Stop at so many states.")
@click.option("--seconds", type=SECONDS, help="Stop after so many seconds.")
@click.option(
    "--save",
    metavar="FILE",
    type=OutputPath(),
    help="Where a counterexample is saved; - for standard output.  [default: counterexample.jsonl]",
)
@json_option
@click.pass_context
def command(context: click.Context, dialect: str, json_path: str | None, save: str | None, **options: Any) -> None:
    """Go breadth-first over all operation sequences of a small cache, and check every invariant in every state.

    States that differ only in what requests are called count once, and in what blocks are where no rule reads their
    numbers. Prompts and generated tokens are of two different tokens. The first broken invariant is shown with the
    shortest sequence of operations that breaks any, which is saved as a log for `hkv check`, `explain` and `shrink`,
    with the reference's answers.

    \b
    Operations that --without leaves out:
      cold    admissions that adopt nothing of what is cached
      parts   allocations for a part of the tokens that are left
      delay   allocations that register nothing, and the commit that does so later
      evict   single blocks that lose their keys
      reset   resets of the prefix cache
      drop    waiting requests that are forgotten

    Exit status: 0 no invariant is broken (whether everything was explored is said), 1 one is, 2 unusable input.
    """
    rules = explore_command_of(registry.dialect_of(dialect))
    refuse_others(rules, COMMANDS, dialect)
    search = search_of(rules, {**options, "dialect": dialect})
    path = save or "counterexample.jsonl"
    _check_folder(path)

    def finish() -> None:
        done = search.found()
        found = done.counterexample
        if found is not None:
            write_output(path, log_bytes(found.header, *found.with_answers()))
        if talks(json_path, save):
            for line in done.lines:
                click.echo(line)
            if found is not None:
                _show_counterexample(found, path)
        write_json(json_path, {**done.record, "counterexample": None if found is None else _record(found, path)})

    with interruption().saying(finish), level_bar("compiling") as progress:
        search.run(progress)
    finish()
    context.exit(0 if search.found().counterexample is None else BROKEN)


def _check_folder(path: str) -> None:
    if path != STANDARD_OUTPUT and not pathlib.Path(path).parent.is_dir():
        raise ConfigError("save", path, "a file in a folder that exists")


def _show_counterexample(found: explore_command.Counterexample, path: str) -> None:
    click.echo(f"broken: {', '.join(found.invariants)}, after {len(found.operations)} operations, and not after fewer:")
    for number, operation in enumerate(found.operations, 2):
        click.echo(f"  {number}: {describe(operation)}")
    click.echo(f"saved as {path}; its answers are the reference's")


def _record(found: explore_command.Counterexample, path: str) -> dict[str, Any]:
    return {
        "invariants": list(found.invariants),
        "operations": [describe(operation) for operation in found.operations],
        "log": path,
    }

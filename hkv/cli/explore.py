"""`hkv explore`: every state that a small cache can reach, every invariant in each."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import click

from hkv.cli.html import html_field, write_page
from hkv.cli.options import command_of, commands, dialect_option, own_options, refuse_others
from hkv.cli.output_option import STANDARD_OUTPUT, OutputPath, Reported, talks, write_json, write_output
from hkv.cli.progress import interruption, level_bar
from hkv.contract import explore_command, registry
from hkv.contract.log import describe
from hkv.contract.options import COUNT, SECONDS, Number, option
from hkv.errors import ConfigError
from hkv.limits import counted
from hkv.oracle.broken_invariant import Broken, first_broken
from hkv.oracle.engines import REFERENCE
from hkv.oracle.exploration import answered, explore_command_of, search_of
from hkv.oracle.history import history, invariant_mark
from hkv.oracle.log_file import log_bytes
from hkv.replay.command import GROUPS
from hkv.spec import LayerSpec

BROKEN = 1
"""Exit status when an invariant is broken."""

COMMANDS = commands(explore_command_of)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ExploreOptions(Reported):
    groups: Sequence[LayerSpec] = option("full:1,swa:1:2", type=GROUPS, help="As for `hkv replay`.")
    watermark: float = option(0.0, type=Number(0, 1), help="Share that stays free.")
    own: dict[str, Any] = own_options(COMMANDS)
    dialect: str = dialect_option()
    limit_states: int | None = option(type=COUNT, help="Stop at so many states.")
    seconds: float | None = option(type=SECONDS, help="Stop after so many seconds.")
    save: str | None = option(
        metavar="FILE",
        type=OutputPath(),
        help="Where a counterexample is saved; - for standard output.  [default: counterexample.jsonl]",
    )
    html: str | None = html_field("every block of a counterexample")


@command_of(
    "explore", _ExploreOptions, epilog="Example: hkv explore --groups full:1,swa:1:2 --num-blocks 5 --max-model-len 2"
)
def command(given: _ExploreOptions) -> int:
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
    rules = explore_command_of(registry.dialect_of(given.dialect))
    refuse_others(rules, COMMANDS, given.dialect)
    search = search_of(rules, click.get_current_context().params)
    path = given.save or "counterexample.jsonl"
    _check_folder(path)

    def finish() -> None:
        report = search.report
        found = report.counterexample
        if found is not None:
            write_output(path, log_bytes(found.header, *answered(found)))
        if talks(given.json_path, given.save, given.html):
            for line in report.lines():
                click.echo(line)
            if found is not None:
                _show_counterexample(found, path)
        document = {**report.record(**search.more), "counterexample": None if found is None else _record(found, path)}
        write_json(given.json_path, document)
        if given.html is not None:
            _write_page(given.html, search)

    with interruption().saying(finish), level_bar("compiling") as progress:
        search.run(progress)
    finish()
    return 0 if search.report.counterexample is None else BROKEN


def _check_folder(path: str) -> None:
    if path != STANDARD_OUTPUT and not pathlib.Path(path).parent.is_dir():
        raise ConfigError("save", path, "a file in a folder that exists")


def _show_counterexample(found: explore_command.Counterexample, path: str) -> None:
    fewest = counted(len(found.operations), "operation")
    click.echo(f"broken: {', '.join(found.invariants)}, after {fewest}, and not after fewer:")
    for number, operation in enumerate(found.operations, 2):
        click.echo(f"  {number}: {describe(operation)}")
    click.echo(f"saved as {path}; its answers are the reference's")


def _write_page(path: str, search: explore_command.Search) -> None:
    """Writes a page of a counterexample, on the cache that was searched, next to the reference if that is another."""
    found = search.report.counterexample
    if found is None:
        click.echo("no counterexample: no page was written", err=True)
        return
    dialect = registry.dialect_of(found.header.dialect)
    headline, text = f"broken: {', '.join(found.invariants)}", log_bytes(found.header, *answered(found))
    with search.explored() as (name, factory):
        reference = dialect.engine(REFERENCE)
        engines = [(name, factory), *([] if reference in (None, factory) else [(REFERENCE, reference)])]
        broken = first_broken(factory, found.header, found.operations)
        if not isinstance(broken, Broken):
            said = f"the last operation breaks it; under watch, {broken}"
            broken = Broken(found.invariants[0], len(found.operations) + 1, "", said, "docs/explore.md says what it is")
        marks, given = [invariant_mark(dialect, broken, name)], (found.header, found.operations, engines)
        case = history("counterexample", *given, marks=marks, headline=headline, text=text)
    write_page(path, "hkv explore: a counterexample", [case])


def _record(found: explore_command.Counterexample, path: str) -> dict[str, Any]:
    return {
        "invariants": list(found.invariants),
        "operations": [describe(operation) for operation in found.operations],
        "log": path,
    }

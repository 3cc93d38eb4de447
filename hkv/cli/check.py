"""`hkv check`: recorded logs against an engine's rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import click
from rich.console import Console
from rich.table import Table

from hkv.cli.bugs_option import bugs_of, bugs_option, refuse_bugs
from hkv.cli.engine_options import FORMS, check_timeout, timeout_option
from hkv.cli.interruption import interruption
from hkv.cli.json_output import json_option, write_json
from hkv.cli.progress import progress_bar
from hkv.errors import ConfigError, UnsupportedConfigError
from hkv.oracle.check import Difference, check_log
from hkv.oracle.engines import engine_factory
from hkv.oracle.log_file import find_logs, read_log

Coverage: TypeAlias = tuple[dict[str, str], dict[str, dict[str, int]]]
"""Rules and their meanings, and for each log how often it exercised which."""


@click.command("check")
@click.argument("logs", nargs=-1, required=True, metavar="LOG...", type=click.Path())
@click.option("--engine", default="numpy", show_default=True, help=f"Which engine to hold against, one of: {FORMS}.")
@bugs_option
@click.option("--coverage", is_flag=True, help="Print which rules the logs exercised, and how often.")
@timeout_option
@json_option
@click.pass_context
def command(
    context: click.Context,
    logs: Sequence[str],
    engine: str,
    bugs: str,
    coverage: bool,
    timeout: float,
    json_path: str | None,
) -> None:
    """Check that an engine answers every operation of recorded LOGs as the recorded engine did.

    A LOG is a file in the format of docs/oplog.md, or a folder of *.jsonl files. For each log that differs, the first
    differing line is printed: file, line, operation, field, wanted, got, and the last operations on the request. Logs
    whose configuration the engine says it does not implement are counted and left out.

    Exit status: 0 all agree, 1 some differ, 2 unusable input.

    Example: hkv check tests/data/oplogs --engine numpy --coverage
    """
    names = bugs_of(bugs, "manager")
    check_timeout(engine)
    factory = engine_factory(engine, timeout)
    paths = find_logs(logs)
    differences: list[Difference] = []
    counts: dict[str, dict[str, int]] = {}
    rules: dict[str, str] = {}
    operations = 0
    unsupported: dict[str, str] = {}
    checked: list[str] = []

    def finish() -> None:
        if json_path != "-":
            _print(differences, (rules, counts) if coverage else None, len(checked), operations, engine)
            if unsupported:
                reason = next(iter(unsupported.values()))
                click.echo(f"{len(unsupported)} more logs left out, which the engine does not implement ({reason})")
        result = _result(differences, (rules, counts) if coverage else None, checked, operations, engine)
        write_json(json_path, {**result, "not_implemented": unsupported})

    with interruption().saying(finish), progress_bar("checking", len(paths)) as advance:
        for path in paths:
            log = read_log(path)
            refuse_bugs(names, log.dialect)
            try:
                difference = check_log(log, factory, names)
            except UnsupportedConfigError as error:
                unsupported[path] = str(error.value)
                continue
            finally:
                advance()
            checked.append(path)
            operations += len(log.operations)
            if difference is not None:
                differences.append(difference)
            if coverage:
                counts[path] = log.dialect.exercised(log)
                rules |= log.dialect.coverage
    if len(unsupported) == len(paths):
        raise ConfigError("engine", engine, f"one that implements one of these logs ({unsupported[paths[0]]})")
    finish()
    context.exit(1 if differences else 0)


def _print(
    differences: Sequence[Difference],
    coverage: Coverage | None,
    logs: int,
    operations: int,
    engine: str,
) -> None:
    for difference in differences:
        click.echo(difference.describe() + "\n")
    if coverage is not None:
        Console().print(_coverage_table(*coverage))
    agreed = logs - len(differences)
    click.echo(f"{agreed} of {logs} logs agree with engine {engine} ({operations:,} operations)")


def _coverage_table(rules: dict[str, str], counts: dict[str, dict[str, int]]) -> Table:
    table = Table(title="Rules exercised", title_justify="left")
    table.add_column("rule", no_wrap=True)
    table.add_column("logs", justify="right")
    table.add_column("times", justify="right")
    table.add_column("meaning")
    for rule, meaning in rules.items():
        times = [count[rule] for count in counts.values() if rule in count]
        table.add_row(rule, str(len(times)), str(sum(times)), meaning)
    return table


def _result(
    differences: Sequence[Difference],
    coverage: Coverage | None,
    paths: Sequence[str],
    operations: int,
    engine: str,
) -> dict[str, Any]:
    found = {difference.path: dataclasses.asdict(difference) for difference in differences}
    logs = [{"path": path, "agrees": path not in found, "difference": found.get(path)} for path in paths]
    result: dict[str, Any] = {"engine": engine, "agrees": not differences, "operations": operations, "logs": logs}
    if coverage is not None:
        rules, counts = coverage
        result["coverage"] = {rule: {p: c[rule] for p, c in counts.items() if rule in c} for rule in rules}
    return result

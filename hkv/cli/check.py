"""`hkv check`: recorded logs against an engine's rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import click

from hkv.cli.html import html_field, log_case, write_page
from hkv.cli.options import FORMS, bugs_option, check_timeout, command_of, names_of, refuse_given, timeout_option
from hkv.cli.output_option import OutputPath, Reported, console, table, talks, write_json, write_output
from hkv.cli.progress import interruption, progress_bar
from hkv.contract import registry
from hkv.contract.options import Number, argument, option
from hkv.errors import ConfigError
from hkv.limits import MAX_SECONDS, counted
from hkv.oracle.account import command as command_line
from hkv.oracle.check import FollowedLog, junit_xml, reproducing
from hkv.oracle.check import follow as follow_logs
from hkv.oracle.engines import engine_factory
from hkv.oracle.log_file import find_logs, log_bytes
from hkv.oracle.side import Drawn
from hkv.oracle.verbs import VERDICTS, Check, CheckResult, filled

FAILING = ("differs", "unusable", "empty")
"""Verdicts that make the command fail, unless told otherwise."""

MOST_WARNINGS = 4
"""Warnings of what logs' caches are about to run into that are printed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _CheckOptions(Reported):
    logs: Sequence[str] = argument(nargs=-1, required=True, metavar="LOG...", type=click.Path())
    engine: str = option("numpy", help=f"Which engine to hold against, one of: {FORMS}.")
    invariants: bool = option(
        False, help="Judge each LOG by the invariants of such caches alone, with no engine beside."
    )
    bugs: Sequence[str] = bugs_option()
    fill: str | None = option(
        metavar="FILE",
        type=OutputPath(),
        help="Write the LOG with the engine's answers in place of those that it lacks; - for standard output.",
    )
    follow: float | None = option(
        metavar="SECONDS",
        type=Number(0.01, MAX_SECONDS),
        help="Go on as the LOGs grow and others come, until none has grown for so long.",
    )
    coverage: bool = option(False, help="Print which rules the logs exercised, and how often.")
    fail_on: str = option(
        ",".join(FAILING),
        metavar="VERDICTS",
        help=f"Verdicts that make the exit status 1, by commas, of: {', '.join(VERDICTS[1:])}.",
    )
    junit: str | None = option(type=OutputPath(), metavar="FILE", help="Write a verdict per log as JUnit XML.")
    html: str | None = html_field("every block through the first LOG that differs, or the first")
    timeout: float = timeout_option()


@command_of("check", _CheckOptions)
def command(given: _CheckOptions) -> int | None:
    """Check that an engine answers every operation of recorded LOGs as the recorded engine did.

    A LOG is a file in the format of docs/oplog.md, - for standard input, or a folder of *.jsonl files; gzip and
    Zstandard are read (*.jsonl.gz, *.jsonl.zst). For each log that differs, the first differing line is printed: file,
    line, operation, field, what the log and the engine say, and the last operations on the request. Logs whose
    configuration the engine says it does not implement are counted and left out. Of several logs, one that cannot be
    read does not hide the others; one without operations agrees with nothing. A log that agrees once a known upstream
    defect is named (--bugs) gets the verdict "known defect", with the defect's name.

    With --fill, a LOG of questions alone, or of some, is answered: operations without "want" get the engine's answers.

    With --follow, logs that a live engine is still writing (docs/checking-your-engine.md) are held against an engine in
    this process,
    a second behind: what the live engine pays is the recording alone.

    With --invariants no engine is asked: a log is judged by the invariants of any such cache
    (docs/tables/invariants.md).

    Exit status: 0 all agree, 1 some have a verdict of --fail-on, 2 unusable input.

    Example: hkv check tests/data/oplogs --engine numpy --coverage
    """
    names, failing = names_of(given.bugs), _failing(given.fail_on)
    check_timeout(given.engine)
    if given.invariants:
        refuse_given(["engine", "bugs", "fill"], "a check against an engine, without --invariants")
    if given.follow is not None:
        refuse_given(
            ["invariants", "bugs", "coverage", "junit", "json_path", "html", "fail_on", "fill"], "nothing with --follow"
        )
        return _follow(given.logs, given.engine, given.timeout, given.follow)
    checking = Check(None if given.invariants else given.engine, names, given.coverage, given.timeout)
    checking.drawn = None if given.html is None else Drawn(given.engine)
    paths = find_logs(given.logs)
    if given.fill is not None:
        refuse_given(["html"], "a check without --fill")
    if given.fill is not None and len(paths) != 1:
        raise ConfigError("fill", f"{len(paths)} logs", "one LOG, whose answers are filled in")

    def tell(interrupted: bool = True) -> None:
        result = checking.result()
        if talks(given.json_path, given.junit, given.html, given.fill):
            _print(result)
        document = _document(result, given.coverage)
        unknown = {"agrees": None} if interrupted and result.agrees else {}  # of the logs that are left
        write_json(given.json_path, {**document, **unknown})

    with interruption().saying(tell), progress_bar("checking", len(paths)) as advance:
        if given.fill is not None:
            engine = reproducing(engine_factory(given.engine, given.timeout), names)
            log = filled(paths[0], engine)
            answers = [getattr(each, "want", None) for each in log.operations]
            write_output(given.fill, log_bytes(log.header, log.operations, answers))
            checking.read(log)
            paths = []
        for path in paths:
            try:
                checking.log(path) if len(paths) == 1 else checking.log_or_note(path)
            finally:
                advance()
    result = checking.finished()
    if given.junit is not None:
        write_output(given.junit, junit_xml(result.engine or "invariants", result.verdicts, failing))
    if given.html is not None and checking.drawn is not None:
        _write_page(given.html, given, names, checking.drawn)
    tell(interrupted=False)
    return any(verdict in failing for verdict, _ in result.verdicts.values())


def _write_page(path: str, given: _CheckOptions, bugs: tuple[str, ...], drawn: Drawn) -> None:
    """Writes a page of the first log that differs, or of the first."""
    log, difference = drawn.log, drawn.difference
    if log is None:
        raise ConfigError("html", path, "a log that can be checked")
    factory = engine_factory(given.engine, given.timeout)
    engines = () if given.invariants else ((given.engine, reproducing(factory, bugs)),)
    options = ["--invariants"] if given.invariants else ["--engine", given.engine]
    again = {"checks it again": command_line("check", log.path, *options)}
    recorded = "log" if difference is not None or not engines else ""
    case = log_case(log, engines, difference, recorded=recorded, commands=again, drawn=drawn.side)
    if difference is None:
        under = f" under {', '.join(drawn.known)}" if drawn.known else ""
        said = f"agrees{under}" if engines else "breaks no invariant that could be asked"
        case["headline"] = f"{said}: {counted(len(case['subjects']), 'operation')}"
    write_page(path, f"hkv check: {log.path}", [case])


def _follow(logs: Sequence[str], engine: str, timeout: float, quiet: float) -> int:
    """Follows logs as they grow, and tells each difference as it comes; the exit status."""
    seen: dict[str, FollowedLog] = {}
    for log in follow_logs(logs, engine_factory(engine, timeout), quiet):
        if log.difference is not None and log.path not in seen:
            click.echo(log.difference.describe() + "\n")
        seen[log.path] = log
    agree = sum(log.difference is None for log in seen.values())
    operations = sum(log.operations for log in seen.values())
    click.echo(f"{agree} of {len(seen)} logs agree with engine {engine} ({operations:,} operations)")
    return 0 if agree == len(seen) else 1


def _failing(text: str) -> frozenset[str]:
    """The verdicts that a text names; ConfigError for an unknown name."""
    named = frozenset(name.strip() for name in text.split(",") if name.strip())
    if unknown := sorted(named - set(VERDICTS[1:])):
        raise ConfigError("fail-on", unknown[0], f"some of {', '.join(VERDICTS[1:])}")
    return named


def _print(result: CheckResult) -> None:
    for difference in result.differences:
        click.echo(difference.describe() + "\n")
    for log in result.checked:
        for name in log.known_defects:
            bug = registry.dialect_of(log.dialect).bugs[name]
            click.echo(f"known defect: {log.path} agrees under {name}: {bug.behaviour} ({bug.engine})")
    if result.rules:
        rows = zip(*(result.coverage[name] for name in ("rule", "logs", "times", "meaning")), strict=True)
        console(wide=False).print(table("=rule|>logs|>times|meaning", rows, title="Rules exercised"))
    empty = [path for path, (verdict, _) in result.verdicts.items() if verdict == "empty"]
    logs, operations = len(result.checked), result.operations
    known = sum(bool(log.known_defects) for log in result.checked)
    agreed = logs - len(result.differences) - len(empty) - known
    for path, problem in result.unusable.items():
        click.echo(f"unusable: {problem if path in problem else f'{path}: {problem}'}")
    for path in empty:
        click.echo(f"empty: {path}")
    warnings = [f"warning: {log.path}: {text}" for log in result.checked for text in log.warnings]
    for text in warnings[:MOST_WARNINGS]:
        click.echo(text)
    if len(warnings) > MOST_WARNINGS:
        click.echo(f"{len(warnings) - MOST_WARNINGS} more warnings, which --json has")
    for log in result.checked:
        if log.ended:
            click.echo(f"ends early: {log.path}: {log.ended}")
    if result.engine:
        under = f", {known} more under known defects of the engine recorded" if known else ""
        click.echo(f"{agreed} of {logs} logs agree with engine {result.engine}{under} ({operations:,} operations)")
    else:
        asked = frozenset[str]().union(*(log.asked for log in result.checked))
        click.echo(
            f"{agreed} of {logs} logs break no invariant of the {len(asked)} that could be asked"
            f" ({operations:,} operations)"
        )
    for name, meaning in result.not_compared.items():
        click.echo(f"not compared, as the engine lacks it: {name} ({meaning})")
    if result.not_implemented:
        reason = next(iter(result.not_implemented.values()))
        click.echo(f"{len(result.not_implemented)} more logs left out, which the engine does not implement ({reason})")


def _document(result: CheckResult, coverage: bool) -> dict[str, Any]:
    differences = [log.difference and dataclasses.asdict(log.difference) for log in result.checked]
    document: dict[str, Any] = {
        "engine": result.engine,
        "agrees": result.agrees,
        "operations": result.operations,
        "logs": [
            {
                "path": log.path,
                "agrees": difference is None,
                "difference": difference,
                "verdict": log.verdict[0],
                "warnings": list(log.warnings),
            }
            for log, difference in zip(result.checked, differences, strict=True)
        ],
        "unusable": dict(result.unusable),
        "not_compared": dict(result.not_compared),
    }
    if not result.engine:
        document["asked"] = {log.path: sorted(log.asked) for log in result.checked}
    if coverage:
        document["coverage"] = {
            rule: {log.path: log.exercised[rule] for log in result.checked if rule in log.exercised}
            for rule in result.rules
        }
    return {**document, "not_implemented": result.not_implemented}

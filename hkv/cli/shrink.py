"""`hkv shrink`: a failing log made small."""

from __future__ import annotations

import dataclasses
import pathlib

import click

from hkv.cli.html import html_field, two_engines, write_page
from hkv.cli.options import FORMS, check_timeout, command_of, ids_option, timeout_option
from hkv.cli.output_option import OutputPath, Reported, talks, write_json, write_output
from hkv.cli.progress import counting_bar, interruption
from hkv.contract import registry
from hkv.contract.case import Case
from hkv.contract.log import describe
from hkv.contract.options import argument, option
from hkv.errors import ConfigError
from hkv.oracle.account import command as command_line
from hkv.oracle.account import lines_of
from hkv.oracle.broken_invariant import Broken, first_broken
from hkv.oracle.engines import engine_factory
from hkv.oracle.found_difference import FoundDifference
from hkv.oracle.history import Engines, invariant_mark
from hkv.oracle.log_file import log_bytes, read_log
from hkv.oracle.shrink import Shrinker


def shrink_with_bar(shrinker: Shrinker, case: Case) -> Case:
    """Shrinks, and shows how many operations are left."""
    with counting_bar("shrinking", len(case.operations), "operations left") as left:
        shrinker.progress = left
        return shrinker.shrink(case)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ShrinkOptions(Reported):
    log: str = argument(metavar="LOG", type=click.Path())
    engine: str = option("jax", help=f"The engine in doubt, one of: {FORMS}.")
    against: str = option("numpy", help="The engine that counts; its answers are written.")
    ids: str = ids_option()
    output: str | None = option(
        *(None, "-o", "--output"),
        metavar="FILE",
        type=OutputPath(),
        help="Where to write the small log; - for standard output. [default: LOG with -small added]",
    )
    html: str | None = html_field("every block of the small case on both engines")
    timeout: float = timeout_option()


@command_of("shrink", _ShrinkOptions)
def command(given: _ShrinkOptions) -> None:
    """Make a LOG on which an engine answers wrongly as small as can be: few operations, tokens, blocks and groups.

    The LOG's own answers are not used: both engines perform its operations, and the small log, on which they still
    disagree at the last line, holds the answers of the one that counts. `hkv check` shows the difference again.

    Exit status: 0 a small log was written, 2 the engines agree on the LOG, or unusable input.

    Example: hkv shrink differences/core-2-v1.jsonl --engine 'cmd:./my-engine'
    """
    log, output, json_path = given.log, given.output, given.json_path
    read = read_log(log)
    check_timeout(given.engine, given.against)
    tested, right = (engine_factory(name, given.timeout) for name in (given.engine, given.against))
    for factory in (tested, right):
        factory(read.header)  # an engine that cannot start says why
    shrinker = Shrinker(tested, right, given.ids)
    case = shrinker.failing(read.header, read.operations)
    if case is None:
        raise ConfigError("log", log, f"operations on which {given.engine} and {given.against} disagree")
    path = output or str(pathlib.Path(log).with_name(f"{pathlib.Path(log).stem}-small.jsonl"))

    def finish(small: Case, broken: Broken | str) -> None:
        if talks(json_path, output, given.html):
            click.echo(f"{log}: {given.engine} differs from {given.against}")
            print_case(small, len(read.operations), broken, shrinker.problem)
        write_output(path, log_bytes(small.header, small.differing, small.answers))
        if talks(json_path, output, given.html):
            print_log(path)
        result = {
            "log": log,
            "small": path,
            "operations": len(small.operations),
            "operations_before_shrinking": len(read.operations),
            "attempts": shrinker.attempts,
            "field": small.mismatch.field,
            "want": small.mismatch.want,
            "got": small.mismatch.got,
            "invariant": broken.name if isinstance(broken, Broken) else None,
            **({} if shrinker.problem is None else {"shrinking_problem": shrinker.problem}),
        }
        write_json(json_path, result)
        if given.html is not None:
            _write_page(given.html, small, broken, ((given.engine, tested), (given.against, right)), path, given.ids)

    with interruption().saying(lambda: finish(shrinker.best or case, "not looked for: interrupted")):
        further, said = shrinker.diagnosed(case, read.operations)
        small = shrink_with_bar(shrinker, further)
        broken = first_broken(tested, small.header, small.operations) if shrinker.keeps else said
    finish(small, broken)


def _write_page(path: str, case: Case, broken: Broken | str, engines: Engines, log: str, ids: str) -> None:
    dialect = registry.dialect_of(case.header.dialect)
    marks = (invariant_mark(dialect, broken, engines[0][0]),) if isinstance(broken, Broken) else ()
    again = {"checks it again": command_line("check", log, "--engine", engines[0][0])}
    page = two_engines(log, case, engines, ids=ids, marks=marks, headline=dialect.difference(case), commands=again)
    write_page(path, f"hkv shrink: {log}", [page])


# Output of a failing case.


def print_case(
    case: Case,
    whole: int,
    broken: Broken | str,
    problem: str | None = None,
    engines: tuple[str, str] | None = None,
) -> None:
    """Prints where the engines differ, which invariant is broken, and the operations that lead there.

    `whole` is how many operations there were before shrinking, `problem` what ended that too early. Of two engines, the
    first is in doubt; they are not named where they are None.
    """
    mismatch = case.mismatch
    line, operation = len(case.answers) + 1, describe(case.differing[-1]) if case.operations else "header"
    doubted, counts = ("", "") if engines is None else (f"  ({name})" for name in engines)
    click.echo(f"  line {line}: {operation}: {mismatch.field}")
    click.echo(f"    wanted {mismatch.want}{counts}\n    got    {mismatch.got}{doubted}")
    click.echo("\n".join(lines_of(case.header, case.operations, broken, whole, len(case.answers))))
    if problem is not None:
        click.echo(f"  shrinking ended early, this is the smallest case up to there: {' '.join(problem.split())}")


def print_found(found: FoundDifference) -> None:
    """Prints the case of a difference, and what the invariants say of the engine that counts."""
    print_case(found.case, found.operations_before_shrinking, found.broken, found.shrinking_problem, found.engines)
    counts, other = found.engines[1], found.broken_by_other
    if isinstance(other, Broken):
        click.echo(f"  {counts} breaks {other.name}, line {other.line}, {other.problem}")
        if found.defined:
            click.echo(f"  {counts} is the definition: {other.name} may be wrong, or not hold of such caches")
    elif isinstance(found.broken, Broken):
        click.echo(f"  {counts}: {other}")
    if found.known:
        click.echo(f"  beyond known defects: {', '.join(found.known)}")


def print_log(path: pathlib.Path | str) -> None:
    """Prints where a case was saved."""
    click.echo(f"  log     {path}")

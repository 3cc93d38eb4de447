"""`hkv shrink`: a failing log made small."""

from __future__ import annotations

import dataclasses
import pathlib

import click

from hkv.cli.engine_options import FORMS, check_timeout, ids_option, timeout_option
from hkv.cli.failing_case import print_case, print_log
from hkv.cli.options import command_of
from hkv.cli.output_option import OutputPath, json_field, talks, write_json, write_output
from hkv.cli.progress import counting_bar, interruption
from hkv.contract.case import Case
from hkv.contract.options import argument, option
from hkv.errors import ConfigError
from hkv.oracle.broken_invariant import Broken, first_broken
from hkv.oracle.engines import engine_factory
from hkv.oracle.log_file import log_bytes, read_log
from hkv.oracle.shrink import Shrinker


def shrink_with_bar(shrinker: Shrinker, case: Case) -> Case:
    """Shrinks, and shows how many operations are left."""
    with counting_bar("shrinking", len(case.operations), "operations left") as left:
        shrinker.progress = left
        return shrinker.shrink(case)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command."""

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
    timeout: float = timeout_option()
    json_path: str | None = json_field()


@command_of("shrink", Options)
def command(given: Options) -> None:
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
        if talks(json_path, output):
            click.echo(f"{log}: {given.engine} differs from {given.against}")
            print_case(small, len(read.operations), broken, shrinker.problem)
        write_output(path, log_bytes(small.header, small.differing, small.answers))
        if talks(json_path, output):
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

    with interruption().saying(lambda: finish(shrinker.best or case, "not looked for: interrupted")):
        further, said = shrinker.diagnosed(case, read.operations)
        small = shrink_with_bar(shrinker, further)
        broken = first_broken(tested, small.header, small.operations) if shrinker.keeps else said
    finish(small, broken)

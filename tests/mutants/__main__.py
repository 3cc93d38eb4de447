"""`python -m tests.mutants`: are the defects noticed that shipped in engines, and those that we plant ourselves?"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from typing import IO

import click
import msgspec

from hkv.limits import MAX_COUNT, MAX_SEED
from hkv.oracle.log_file import write_atomically
from tests.mutants import process_judge, suite_judge
from tests.mutants.catalogue import INSTALLED, choose
from tests.mutants.provenance import target_of
from tests.mutants.row import DIFF, Planted, Verdict
from tests.mutants.table import markdown_table, package_table, record, recorded, show, summary

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it of other programs."""


@click.command(epilog="Example: python -m tests.mutants --only eviction --markdown kills.md")
@click.option("--only", metavar="NAME", multiple=True, help="A section, a target or a mutant; may be given again.")
@click.option(
    "--target",
    type=click.Choice(INSTALLED),
    help="Plant in that installed package, and have `hkv diff` judge it, with its default settings.",
)
@click.option(
    "--seeds",
    type=click.IntRange(1, MAX_COUNT),
    help=f"Examples of a suite before a defect survives.  [default: {suite_judge.SEEDS}; {suite_judge.DIFF_SEEDS} a"
    " feature of `hkv diff`]",
)
@click.option(
    "--first-seed", type=click.IntRange(0, MAX_SEED), default=0, show_default=True, help="Number of the first example."
)
@click.option("--sample", metavar="N", type=click.IntRange(1, MAX_COUNT), help="Judge N of them, drawn at random.")
@click.option("--seed", type=click.IntRange(0, MAX_SEED), default=0, show_default=True, help="For --sample.")
@click.option("--cases", is_flag=True, help="Print the shrunk case of each kill as well.")
@click.option("--list", "listing", is_flag=True, help="Only say which there are, and what they are planted in.")
@click.option("--markdown", metavar="F", type=click.Path(), help="Write the table as Markdown to the file F.")
@click.option("--json", "json_path", metavar="F", type=click.Path(), help="Write JSON to F; - for standard output.")
@click.option(
    "--onto",
    metavar="F",
    type=click.File("rb"),
    help="Take the rows that are not judged now from F, an earlier --json.",
)
def command(
    only: tuple[str, ...],
    target: str | None,
    seeds: int | None,
    first_seed: int,
    sample: int | None,
    seed: int,
    cases: bool,
    listing: bool,
    markdown: str | None,
    json_path: str | None,
    onto: IO[bytes] | None,
) -> None:
    """Plant defects one at a time and see what notices each.

    A defect that a suite judges counts as caught when an invariant breaks with it alone; nothing is compared with the
    code without it. Where a test is its judge, the test has to fail. Exit status 1 if any survives.
    """
    chosen = _chosen(only, sample, seed, target)
    if listing:
        for row in chosen:
            click.echo(f"{target or target_of(row):10} {row.section:16} {row.name:55} {row.judge_name}")
        return
    verdicts: list[Verdict] = []
    status = 0
    try:
        for verdict in judged(chosen, seeds, first_seed):
            verdicts.append(verdict)
            if target is not None:
                click.echo(f"{verdict.outcome:9} {verdict.mutant.name}: {verdict.problem}", err=True)
    except KeyboardInterrupt:
        status = INTERRUPTED
    again = [verdict.mutant.name for verdict in verdicts] if onto is not None else []
    if onto is not None:
        every = _chosen((), None, 0, target)
        judged_before = recorded(msgspec.json.decode(onto.read())["mutants"], every)
        verdicts += [verdict for verdict in judged_before if verdict.mutant not in chosen]
        chosen = every
    verdicts.sort(key=lambda verdict: chosen.index(verdict.mutant))
    result = {"summary": summary(verdicts), "mutants": [record(verdict) for verdict in verdicts]}
    written = msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"
    if json_path == "-":
        click.echo(written, nl=False)
    else:
        show(verdicts, cases)
    if json_path not in (None, "-"):
        write_atomically(json_path, written)
    if markdown is not None:
        page = markdown_table(verdicts) if target is None else package_table(verdicts, target, again)
        write_atomically(markdown, page.encode())
    sys.exit(status or (0 if all(verdict.killed for verdict in verdicts) else 1))


def _chosen(only: Sequence[str], sample: int | None, seed: int, target: str | None = None) -> list[Planted]:
    try:
        chosen = choose(only, target)
    except KeyError as error:
        raise click.UsageError(f"--only {error.args[0]!r} is no mutant, section or target; --list has them") from None
    if sample is not None and sample < len(chosen):
        picked = sorted(random.Random(seed).sample(range(len(chosen)), sample))
        chosen = [chosen[index] for index in picked]
    return chosen


def judged(chosen: Sequence[Planted], seeds: int | None = None, first_seed: int = 0) -> Iterator[Verdict]:
    """The verdicts, of tests first: their processes are forked, which has to be before this one uses JAX."""
    by_test = [row for row in chosen if row.judged_by_test]
    if by_test:
        process_judge.prepare()
    for row in by_test:
        row.property()  # imported here once, not in every child
    for row in by_test:
        verdict = process_judge.judge(row)
        click.echo(f"{verdict.outcome:9} {verdict.seconds:6.1f} s  {row.section:9} {row.name}", err=True)
        yield verdict
    for row in chosen:
        if row.judge == DIFF:
            yield suite_judge.judge_by_diff(row, seeds or suite_judge.DIFF_SEEDS, first_seed)
        elif not row.judged_by_test:
            yield suite_judge.judge(row, seeds or suite_judge.SEEDS, first_seed)


if __name__ == "__main__":
    command()

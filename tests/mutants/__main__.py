"""`python -m tests.mutants`: are the defects noticed that shipped in engines, and those that we plant ourselves?"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence

import click
import msgspec

from hkv.limits import MAX_COUNT, MAX_SEED
from hkv.oracle.atomic import write_atomically
from tests.mutants import process_judge, suite_judge
from tests.mutants.catalogue import choose
from tests.mutants.provenance import target_of
from tests.mutants.row import Planted
from tests.mutants.table import markdown_table, record, show, summary
from tests.mutants.verdict import Verdict

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it of other programs."""


@click.command(epilog="Example: python -m tests.mutants --only eviction --markdown kills.md")
@click.option("--only", metavar="NAME", multiple=True, help="A section, a target or a mutant; may be given again.")
@click.option(
    "--seeds",
    type=click.IntRange(1, MAX_COUNT),
    default=suite_judge.SEEDS,
    show_default=True,
    help="Examples of a suite before it survives.",
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
def command(
    only: tuple[str, ...],
    seeds: int,
    first_seed: int,
    sample: int | None,
    seed: int,
    cases: bool,
    listing: bool,
    markdown: str | None,
    json_path: str | None,
) -> None:
    """Plant defects one at a time and see what notices each.

    A defect that a suite judges counts as caught when an invariant breaks with it alone; nothing is compared with the
    code without it. Where a test is its judge, the test has to fail. Exit status 1 if any survives.
    """
    chosen = _chosen(only, sample, seed)
    if listing:
        for row in chosen:
            click.echo(f"{target_of(row):10} {row.section:16} {row.name:55} {row.judge_name}")
        return
    verdicts: list[Verdict] = []
    status = 0
    try:
        for verdict in judged(chosen, seeds, first_seed):
            verdicts.append(verdict)
    except KeyboardInterrupt:
        status = INTERRUPTED
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
        write_atomically(markdown, markdown_table(verdicts).encode())
    sys.exit(status or (0 if all(verdict.killed for verdict in verdicts) else 1))


def _chosen(only: Sequence[str], sample: int | None, seed: int) -> list[Planted]:
    try:
        chosen = choose(only)
    except KeyError as error:
        raise click.UsageError(f"--only {error.args[0]!r} is no mutant, section or target; --list has them") from None
    if sample is not None and sample < len(chosen):
        picked = sorted(random.Random(seed).sample(range(len(chosen)), sample))
        chosen = [chosen[index] for index in picked]
    return chosen


def judged(chosen: Sequence[Planted], seeds: int = suite_judge.SEEDS, first_seed: int = 0) -> Iterator[Verdict]:
    """The verdicts, of tests first: their processes are forked, which has to be before this one uses JAX."""
    by_test = [row for row in chosen if not row.judged_by_suite]
    if by_test:
        process_judge.prepare()
    for row in by_test:
        row.property()  # imported here once, not in every child
    for row in by_test:
        verdict = process_judge.judge(row)
        click.echo(f"{verdict.outcome:9} {verdict.seconds:6.1f} s  {row.section:9} {row.name}", err=True)
        yield verdict
    for row in chosen:
        if row.judged_by_suite:
            yield suite_judge.judge(row, seeds, first_seed)


if __name__ == "__main__":
    command()

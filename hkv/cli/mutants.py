"""`hkv mutants`: does the suite catch the bugs that shipped?"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from hkv.cli.given_options import refuse_given
from hkv.cli.interruption import interruption
from hkv.cli.json_output import json_option, write_json
from hkv.cli.output_option import OutputPath, talks, write_output
from hkv.cli.progress import progress_bar
from hkv.errors import ConfigError
from hkv.limits import MAX_COUNT, MAX_SEED
from hkv.testing.mutants import MUTANTS, SECTIONS, Mutant, Verdict, judge, provenance
from hkv.testing.mutants.judge import SEEDS

EPILOG = "Example: hkv mutants --only eviction --markdown kills.md"


@click.command(epilog=EPILOG)
@click.option("--only", metavar="NAME", multiple=True, help="A section, or a mutant's name; may be given again.")
@click.option(
    "--seeds", type=click.IntRange(1, MAX_COUNT), default=SEEDS, show_default=True, help="Examples before it survives."
)
@click.option(
    "--first-seed", type=click.IntRange(0, MAX_SEED), default=0, show_default=True, help="Number of the first example."
)
@click.option("--sample", metavar="N", type=click.IntRange(1, MAX_COUNT), help="Judge N of them, drawn at random.")
@click.option("--seed", type=click.IntRange(0, MAX_SEED), default=0, show_default=True, help="For --sample.")
@click.option("--cases", is_flag=True, help="Print the shrunk case of each kill as well.")
@click.option(
    "--markdown",
    metavar="F",
    type=OutputPath(),
    help="Write the table as Markdown to the file F; - for standard output.",
)
@json_option
def command(
    only: tuple[str, ...],
    seeds: int,
    first_seed: int,
    sample: int | None,
    seed: int,
    cases: bool,
    markdown: str | None,
    json_path: str | None,
) -> int:
    """Plant published bugs one at a time and see which invariant catches each.

    A bug counts as caught when an invariant breaks with the bug alone: nothing is compared with the code without it.
    Exit status 1 if any survives.
    """
    if sample is None:
        refuse_given(["seed"], "--sample N beside it, which is drawn by it")
    chosen = choose(only, sample, seed)
    verdicts: list[Verdict] = []

    def finish() -> None:
        if talks(json_path, markdown):
            show(verdicts, cases)
        if markdown is not None:
            write_output(markdown, markdown_table(verdicts).encode())
        write_json(json_path, {"summary": summary(verdicts), "mutants": [record(verdict) for verdict in verdicts]})

    with interruption().saying(finish), progress_bar("mutants", len(chosen)) as done:
        for mutant in chosen:
            verdicts.append(judge(mutant, seeds, first_seed))
            done()
    finish()
    return 0 if all(verdict.killed for verdict in verdicts) else 1


def choose(only: Sequence[str], sample: int | None, seed: int) -> list[Mutant]:
    """The mutants of those sections and names, or all; a sample of them if asked for.

    Raises:
      ConfigError: a name that is neither.
    """
    for name in only:
        if name not in SECTIONS and name not in MUTANTS:
            raise ConfigError("--only", name, f"a mutant's name or one of {', '.join(SECTIONS)}")
    chosen = [m for m in MUTANTS.values() if not only or m.section in only or m.name in only]
    if sample is not None and sample < len(chosen):
        picked = set(random.Random(seed).sample(range(len(chosen)), sample))
        chosen = [mutant for index, mutant in enumerate(chosen) if index in picked]
    return chosen


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Figures over all verdicts; seconds and sizes of kills only."""
    killed = [verdict for verdict in verdicts if verdict.killed]
    found = provenance.count([verdict.mutant for verdict in verdicts])
    return {
        "mutants": len(verdicts),
        "public_references": found.public,
        "own_names": found.slugs,
        "targets": found.targets,
        "killed": len(killed),
        "survivors": [verdict.mutant.name for verdict in verdicts if not verdict.killed],
        "median_seconds": statistics.median(verdict.seconds for verdict in killed) if killed else None,
        "median_size": statistics.median(verdict.size for verdict in killed) if killed else None,
        "largest_size": max((verdict.size for verdict in killed), default=None),
    }


def record(verdict: Verdict) -> dict[str, Any]:
    """A verdict as plain values."""
    mutant = verdict.mutant
    return {
        "name": mutant.name,
        "section": mutant.section,
        "upstream": list(mutant.upstream),
        "target": provenance.target_of(mutant),
        "wrong": mutant.wrong,
        "suite": mutant.suite,
        "expected": list(mutant.expected),
        "invariant": verdict.invariant,
        "problem": verdict.problem,
        "examples": verdict.examples,
        "seconds": round(verdict.seconds, 3),
        "size": verdict.size,
        "case": list(verdict.lines),
    }


def show(verdicts: Sequence[Verdict], cases: bool) -> None:
    """Prints the kill table."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    table = Table(box=None, pad_edge=False)
    for title in ("mutant", "upstream", "caught by"):
        table.add_column(title, overflow="fold")
    for title in ("examples", "seconds", "size"):
        table.add_column(title, justify="right")
    for verdict in verdicts:
        shown = verdict.invariant or "SURVIVES"
        numbers = (str(verdict.examples), f"{verdict.seconds:.2f}", str(verdict.size) if verdict.killed else "-")
        table.add_row(verdict.mutant.name, " ".join(verdict.mutant.upstream), shown, *numbers)
    console.print(table)
    if cases:
        for verdict in verdicts:
            console.print(f"\n{verdict.mutant.name}: {verdict.problem}", markup=False)
            for line in verdict.lines:
                console.print(f"  {line}", markup=False, soft_wrap=True)
    console.print(f"\n{in_words(verdicts)}", markup=False, soft_wrap=True)
    console.print(provenance.in_words([verdict.mutant for verdict in verdicts]), markup=False, soft_wrap=True)


def in_words(verdicts: Sequence[Verdict]) -> str:
    """The figures in one sentence or two."""
    figures = summary(verdicts)
    text = f"{figures['killed']} of {figures['mutants']} mutants killed"
    if figures["killed"]:
        text += (
            f", in {figures['median_seconds']:.2f} s (median); shrunk to {figures['median_size']:g} operations"
            f" (median), {figures['largest_size']} at most"
        )
    survivors = figures["survivors"]
    return text + (f". Survivors: {', '.join(survivors)}" if survivors else ".")


def markdown_table(verdicts: Sequence[Verdict]) -> str:
    """The kill table as a Markdown document, one table a section."""
    lines = [HEAD, "", in_words(verdicts), "", provenance.in_words([verdict.mutant for verdict in verdicts]), ""]
    for section in dict.fromkeys(verdict.mutant.section for verdict in verdicts):
        lines += [f"## {section.replace('-', ' ').capitalize()}", "", TITLES, RULE]
        for verdict in verdicts:
            if verdict.mutant.section == section:
                lines.append(_row(verdict))
        lines.append("")
    return "\n".join(lines)


def _row(verdict: Verdict) -> str:
    mutant = verdict.mutant
    upstream = ", ".join(mutant.upstream)
    numbers = f"{verdict.examples} | {verdict.seconds:.2f} | {verdict.size if verdict.killed else '-'}"
    caught = f"{verdict.invariant}" if verdict.killed else "**survives**"
    return f"| `{mutant.name}` | {upstream} | {mutant.wrong} | {mutant.suite} | {caught} | {numbers} |"


TITLES = "| mutant | upstream | what goes wrong | suite | caught by | examples | seconds | size |"
RULE = "|---|---|---|---|---|--:|--:|--:|"

HEAD = """# Mutants

Each row is a bug that shipped in an engine, or was proposed and caught in review, planted in this code as an edit of
a function or two. The ids name the reports whose rule is broken: `#` a report or a change, `@` and digits a commit; `@`
and a word is a name given here, for behaviour that no public report is known of. The edit is this code's form of it,
and several edits may stand for one report. A suite runs with the bug alone until an invariant breaks; nothing is
compared with the code without it.
*Examples* and *seconds* say how long that took, *size* how many operations the shrunk case has (1 for suites whose
cases are no histories).

No mutant edits compiled code: its defects are no published bugs, but one-line edits judged by comparison with the
reference. They are rows of `tests/mutants`; `python -m tests.mutants` plants them, [planted.md](planted.md) lists them.

This page is written by `hkv mutants --markdown docs/mutants.md`. `hkv mutants --only NAME --cases` prints a case."""

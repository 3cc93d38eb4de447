"""The kill table: as figures, on the terminal, and as `docs/tables/mutants.md`."""

from __future__ import annotations

import importlib.metadata
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.mutants import provenance
from tests.mutants.provenance import TARGETS
from tests.mutants.row import Planted, Verdict


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Figures over all verdicts; seconds and sizes of kills by suites only, which shrink what they find."""
    killed = [verdict for verdict in verdicts if verdict.killed]
    shrunk = [verdict for verdict in killed if verdict.mutant.judged_by_suite]
    found = provenance.count([verdict.mutant for verdict in verdicts if verdict.mutant.upstream])
    return {
        "mutants": len(verdicts),
        "public_references": found.public,
        "own_names": found.slugs,
        "targets": provenance.by_target([verdict.mutant for verdict in verdicts]),
        "killed": len(killed),
        "survivors": [verdict.mutant.name for verdict in verdicts if not verdict.killed],
        "median_seconds": statistics.median(verdict.seconds for verdict in shrunk) if shrunk else None,
        "median_size": statistics.median(verdict.size for verdict in shrunk) if shrunk else None,
        "largest_size": max((verdict.size for verdict in shrunk), default=None),
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
        "judge": mutant.judge_name,
        "expected": list(mutant.expected),
        "outcome": verdict.outcome,
        "invariant": verdict.invariant,
        "problem": verdict.problem,
        "examples": verdict.examples,
        "seconds": round(verdict.seconds, 3),
        "size": verdict.size,
        "case": list(verdict.lines),
    }


def recorded(records: Sequence[dict[str, Any]], rows: Sequence[Planted]) -> list[Verdict]:
    """Verdicts on rows out of what `record` made of them; rows that are not there are left out."""
    known = {each["name"]: each for each in records}
    found = [(row, known[row.name]) for row in rows if row.name in known]
    return [
        Verdict(
            mutant=row,
            outcome=each["outcome"],
            invariant=each["invariant"],
            problem=each["problem"],
            seconds=each["seconds"],
            examples=each["examples"],
            size=each["size"],
            lines=tuple(each["case"]),
        )
        for row, each in found
    ]


def show(verdicts: Sequence[Verdict], cases: bool) -> None:
    """Prints the kill table."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    table = Table(box=None, pad_edge=False)
    for title in ("mutant", "upstream", "caught by"):
        table.add_column(title, overflow="fold")
    for title in ("examples", "seconds", "size"):
        table.add_column(title, justify="right")
    for verdict in verdicts:
        shown = verdict.invariant or verdict.outcome.upper()
        numbers = (str(verdict.examples), f"{verdict.seconds:.2f}", str(verdict.size) if verdict.killed else "-")
        table.add_row(verdict.mutant.name, " ".join(verdict.mutant.upstream), shown, *numbers)
    console.print(table)
    if cases:
        for verdict in verdicts:
            console.print(f"\n{verdict.mutant.name}: {verdict.problem}", markup=False)
            for line in verdict.lines:
                console.print(f"  {line}", markup=False, soft_wrap=True)
    console.print(f"\n{in_words(verdicts)}", markup=False, soft_wrap=True)
    console.print(_origins(verdicts), markup=False, soft_wrap=True)


def in_words(verdicts: Sequence[Verdict]) -> str:
    """The figures in one sentence or two."""
    figures = summary(verdicts)
    text = f"{figures['killed']} of {figures['mutants']} mutants killed"
    if figures["largest_size"]:
        text += (
            f", by suites in {figures['median_seconds']:.2f} s (median), shrunk to {figures['median_size']:g}"
            f" operations (median), {figures['largest_size']} at most"
        )
    survivors = figures["survivors"]
    return text + (f". Survivors: {', '.join(survivors)}." if survivors else ".")


def _origins(verdicts: Sequence[Verdict]) -> str:
    """Origins of the published mutants, and number of our own."""
    published = [verdict.mutant for verdict in verdicts if verdict.mutant.upstream]
    own = [verdict.mutant for verdict in verdicts if not verdict.mutant.upstream]
    sentences = [provenance.in_words(published)] if published else []
    if own:
        planted = [f"{TARGETS[target]} {number}" for target, number in provenance.by_target(own).items() if number]
        sentences.append(f"{len(own)} are one-line edits of our own: {', '.join(planted)}.")
    return " ".join(sentences)


def markdown_table(verdicts: Sequence[Verdict]) -> str:
    """The kill table as a Markdown document, one table a section."""
    lines = [HEAD, "", in_words(verdicts), "", _origins(verdicts), ""]
    for section in dict.fromkeys(verdict.mutant.section for verdict in verdicts):
        mine = [verdict for verdict in verdicts if verdict.mutant.section == section]
        by_suite = mine[0].mutant.judged_by_suite
        lines += [f"## {section.replace('-', ' ').capitalize()}", "", *(PUBLISHED_TITLES if by_suite else OWN_TITLES)]
        lines += [_published_row(verdict) if by_suite else _own_row(verdict) for verdict in mine]
        lines.append("")
    return "\n".join(lines)


def package_table(verdicts: Sequence[Verdict], package: str, again: Sequence[str] = ()) -> str:
    """The table of defects planted in an installed package, as Markdown; `again` were judged by themselves, after the
    others.
    """
    installed = package.partition("-")[0]
    version = importlib.metadata.version(installed)
    killed = [verdict for verdict in verdicts if verdict.killed]
    sizes, seconds = [verdict.size for verdict in killed] or [0], [verdict.seconds for verdict in killed] or [0.0]
    said = (
        f"{len(killed)} of {len(verdicts)} found in {statistics.median(seconds):.1f} s (median), made small to"
        f" {statistics.median(sizes):g} operations (median), {max(sizes)} at most, and named by the first line."
    )
    if again:
        said += f" Judged again by themselves, after the others: {', '.join(f'`{name}`' for name in again)}."
    lines = [PACKAGE_HEAD.format(package=package, installed=installed, version=version), "", said, "", *PACKAGE_TITLES]
    for verdict in verdicts:
        mutant = verdict.mutant
        upstream = f" ({', '.join(mutant.upstream)})" if mutant.upstream else ""
        report = (
            _shortened(verdict.problem) if verdict.killed else f"**{verdict.outcome}** {_shortened(verdict.problem)}"
        )
        numbers = f"{verdict.examples} | {verdict.seconds:.1f} | {verdict.size or '-'}"
        lines.append(f"| `{mutant.name}` | {mutant.wrong}{upstream} | {numbers} | {report} | {mutant.reader or '-'} |")
    return "\n".join([*lines, ""])


def _shortened(text: str) -> str:
    """A report's line, cut where it is longer than a table's cell should be."""
    plain = text.replace("|", "\\|").replace("][", "]\\[")  # two pairs of brackets are a link by reference
    return plain if len(plain) <= MOST else plain[: MOST - 4] + " ..."


def _published_row(verdict: Verdict) -> str:
    mutant = verdict.mutant
    upstream = ", ".join(mutant.upstream)
    numbers = f"{verdict.examples} | {verdict.seconds:.2f} | {verdict.size if verdict.killed else '-'}"
    caught = f"{verdict.invariant}" if verdict.killed else f"**{verdict.outcome}**"
    return f"| `{mutant.name}` | {upstream} | {mutant.wrong} | {mutant.judge} | {caught} | {numbers} |"


def _own_row(verdict: Verdict) -> str:
    mutant = verdict.mutant
    edits = "; ".join(f"`{edit.old}` -> `{edit.new}`" for edit in mutant.edits).replace("|", "\\|").replace("\n", " ")
    caught = verdict.invariant if verdict.killed else f"**{verdict.outcome}**"
    return f"| `{mutant.name}` | `{mutant.edits[0].target}` | {edits} | {caught} |"


PUBLISHED_TITLES = (
    "| mutant | upstream | what goes wrong | suite | caught by | examples | seconds | size |",
    "|---|---|---|---|---|--:|--:|--:|",
)

MOST = 220
"""Characters of a report's first line that the table shows."""

PACKAGE_TITLES = (
    "| mutant | what goes wrong | seeds | seconds | size | first line of the report | leads to |",
    "|---|---|--:|--:|--:|---|---|",
)

PACKAGE_HEAD = """# Defects planted in {package}

Each row is a defect planted by itself, in memory, in the installed {installed} {version}, and what
`hkv diff` says of it and the reference with its default settings, or with the `--version` that a row names.
`python -m tests.mutants --target {package} --markdown docs/tables/mutants-in-{package}.md` writes this page; the
edits are in `tests/mutants/rows/{package}.toml`.

*Seeds* and *seconds* say how long it takes until the two differ, feature after feature in the command's order;
*size* is how many operations the case has, those included in which the engine goes on by itself until an invariant
breaks. The first line of the report stands here without the name of its seed. A defect counts only if that line names
the cause, by words that its row holds it to, and the case has at most 12 operations; other rows say **misread**, or
**lives** where the engines never differed. Rows of the file that are missing here were not measured in this run.
*Leads to* is the grade that a reader gave the first line who had read neither the edits nor the engine's code, held
against the second column: to the *cause*, to an *effect* of it in the right part of the engine, or *astray*."""

OWN_TITLES = ("| mutant | function | edit | caught by |", "|---|---|---|---|")

HEAD = """# Mutants

Each row is a defect planted in this code by itself, and what notices it. This page is written by
`python -m tests.mutants --markdown docs/tables/mutants.md`; `--only NAME --cases` prints a case, `--help` says more.
The rows are data: `tests/mutants/rows`. [mutants-in-vllm.md](mutants-in-vllm.md) and
[mutants-in-sglang.md](mutants-in-sglang.md) have those that are planted in the engines themselves.

Rows with *upstream* are bugs that shipped in an engine, or were proposed and caught in review, planted as an edit of
a function or two. The ids name the reports whose rule is broken: `#` a report or a change, `@` and digits a commit; `@`
and a word is a name given here, for behaviour that no public report is known of. The edit is this code's form of it,
and several edits may stand for one report. A suite runs with the bug alone until an invariant breaks; nothing is
compared with the code without it.
*Examples* and *seconds* say how long that took, *size* how many operations the shrunk case has (1 for suites whose
cases are no histories).

Rows without are one-line edits of our own. A test, or a property that tests use, has to fail over each."""

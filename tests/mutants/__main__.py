"""Plants defects one at a time and says which property kills each: `python -m tests.mutants [--target T] [--name N]`.

Exit status 1 if one lives, 2 for a name that there is not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click
from rich.console import Console
from rich.table import Table

from tests.mutants import judging


@click.command(help=__doc__)
@click.option("--target", "targets", multiple=True, metavar="T", help="Part of the code; may be given again.")
@click.option("--name", "names", multiple=True, metavar="N", help="One defect; may be given again.")
@click.option("--sample", is_flag=True, help="The fixed sample that the tests plant.")
@click.option("--list", "listing", is_flag=True, help="Only say which there are.")
@click.option("--markdown", metavar="F", help="Write the table as Markdown to the file F.")
def command(targets: Sequence[str], names: Sequence[str], sample: bool, listing: bool, markdown: str | None) -> None:
    """Judges the chosen rows."""
    judging.prepare()
    from tests.mutants import rows

    try:
        chosen = rows.choose(targets, names, sample)
    except KeyError as error:
        raise click.UsageError(f"{error.args[0]} is neither a target nor a defect; --list shows them") from None
    if listing:
        for row in chosen:
            click.echo(f"{row.target:10} {row.name:45} {row.property_name}")
        return
    for row in chosen:
        row.property()  # imported here once, not in every child
    verdicts = []
    for row in chosen:
        verdicts.append(judging.judge(row))
        last = verdicts[-1]
        click.echo(f"{last.outcome:9} {last.seconds:6.1f} s  {row.target:9} {row.name}", err=True)
    show(verdicts)
    if markdown is not None:
        with open(markdown, "w", encoding="utf-8") as file:
            file.write(markdown_table(verdicts))
    sys.exit(0 if all(verdict.outcome == "killed" for verdict in verdicts) else 1)


def show(verdicts: Sequence[judging.Verdict]) -> None:
    """The table, and the count."""
    table = Table("target", "defect", "function", "outcome", "by", "s", box=None)
    for verdict in verdicts:
        row = verdict.planted
        said = "" if verdict.outcome == "killed" else f" ({verdict.said})"
        function = row.function.split(":")[1]
        table.add_row(
            row.target, row.name, function, verdict.outcome + said, row.property_name, f"{verdict.seconds:.1f}"
        )
    console = Console(width=200)
    console.print(table)
    console.print(in_words(verdicts))


def in_words(verdicts: Sequence[judging.Verdict]) -> str:
    """The count in a sentence, by target, and who lives."""
    killed = [verdict for verdict in verdicts if verdict.outcome == "killed"]
    targets = list(dict.fromkeys(verdict.planted.target for verdict in verdicts))
    parts = []
    for target in targets:
        mine = [verdict for verdict in verdicts if verdict.planted.target == target]
        parts.append(f"{target} {sum(v.outcome == 'killed' for v in mine)} of {len(mine)}")
    seconds = sum(verdict.seconds for verdict in verdicts)
    text = f"{len(killed)} of {len(verdicts)} planted defects killed in {seconds:.0f} s of processor time:"
    text += f" {', '.join(parts)}."
    living = [verdict.planted.name for verdict in verdicts if verdict.outcome != "killed"]
    return text + (f" Not killed: {', '.join(living)}." if living else "")


def markdown_table(verdicts: Sequence[judging.Verdict]) -> str:
    """The table as a Markdown document."""
    lines = [HEAD, "", in_words(verdicts), "", "| target | defect | function | edit | killed by |"]
    lines.append("|---|---|---|---|---|")
    for verdict in verdicts:
        row = verdict.planted
        edit = f"`{row.text}` -> `{row.defect}`".replace("|", "\\|").replace("\n", " ")
        by = row.property_name if verdict.outcome == "killed" else f"**{verdict.outcome}**"
        lines.append(f"| {row.target} | `{row.name}` | `{row.function}` | {edit} | {by} |")
    return "\n".join([*lines, ""])


HEAD = """# Planted defects

Each row is one edit of one function of the compiled code: the rules of the compiled cache, the mechanisms under them,
whole steps, bytes by block tables, and GPU kernels, which the interpreter runs. They are no published bugs (those are
in [mutants.md](mutants.md)): each stands for a mistake that is easily made there. The last column names the test or
property that fails over it; `python -m tests.mutants --name NAME` plants one and runs that. Tests plant a fixed sample.

This page is written by `python -m tests.mutants --markdown docs/planted.md`."""


if __name__ == "__main__":
    command()

"""`hkv explain`: what happened to a request up to a line of a log, and why its hit is not longer."""

from __future__ import annotations

import dataclasses

import click

from hkv.cli.html import html_field, log_case, write_page
from hkv.cli.options import command_of
from hkv.cli.output_option import Reported, console, table, talks, write_json
from hkv.contract import registry
from hkv.contract.explanation import Explanation, Resumption
from hkv.contract.options import COUNT, argument, option
from hkv.oracle.account import command as command_line
from hkv.oracle.engines import REFERENCE, engine_factory
from hkv.oracle.log_file import read_log
from hkv.oracle.verbs import explain

MOST_BLOCKS = 24
"""Blocks whose history is printed; `--json` has all."""

MOST_MISSING = 3
"""Most missing entries of a group that are printed; `--json` has all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ExplainOptions(Reported):
    log: str = argument(metavar="LOG", type=click.Path())
    line: int = option(required=True, type=COUNT, help="Line of the LOG, the header being line 1.")
    request: str | None = option(
        metavar="ID", help="The request to tell about. [default: the last one that is named up to the line]"
    )
    html: str | None = html_field("every block through the LOG, and opens at the line")


@command_of("explain", _ExplainOptions)
def command(given: _ExplainOptions) -> None:
    """Tell what happened to a request and its blocks up to a line of a LOG, and why its hit is not longer.

    The reference performs the LOG up to that line. For each group it says the largest boundary at which that group
    alone could resume the request just before the line, by the definition of a hit, and what the group lacks for one
    boundary more than all groups can.

    Example: hkv explain differences/core-2-v1.jsonl --line 8
    """
    read = read_log(given.log)
    found = explain(read, given.line, given.request)
    if talks(given.json_path, given.html):
        _print(found, registry.dialect_of(read.header.dialect).title)
    write_json(given.json_path, dataclasses.asdict(found))
    if given.html is not None:
        again = {"the same in the terminal": command_line("explain", given.log, "--line", given.line)}
        engines = ((REFERENCE, engine_factory(REFERENCE)),)
        case = log_case(read, engines, line=given.line, commands=again)
        write_page(given.html, f"hkv explain: {given.log}", [case])


def _print(found: Explanation, title: str) -> None:
    click.echo(f"line {found.line}: {found.operation}")
    if found.answer:
        click.echo(f"  the reference{found.answer}")
    if found.differs:
        click.echo(f"  {found.differs}")
    if found.departed is not None:
        place = "this line" if found.departed == found.line else f"line {found.departed}"
        click.echo(f"  the log's own answers are others from {place} on; what follows is the reference's account")
    if not found.request:
        click.echo("  no request is there up to this line")
        return
    click.echo(f"\nrequest {found.request}, before this line: {found.situation}")
    for number, text in found.events:
        click.echo(f"  {number:>5}  {text}")
    if found.blocks:
        click.echo(f"\nblocks: {len(found.blocks)}, its own and those that lost what it would need")
    for block, events in list(found.blocks.items())[:MOST_BLOCKS]:
        click.echo(f"  block {block}")
        for number, text in events:
            click.echo(f"  {number:>5}  {text}")
    if len(found.blocks) > MOST_BLOCKS:
        click.echo(f"  and {len(found.blocks) - MOST_BLOCKS} more blocks")
    _print_groups(found, title)


def _print_groups(found: Explanation, title: str) -> None:
    click.echo(
        f"\nlongest hit by definition: {found.hit} tokens; every hit is a multiple of {found.alignment} "
        "and leaves one token to compute"
    )
    if found.found is not None and found.found != found.hit:
        click.echo(f"the lookup found {found.found}: {title}'s way of looking differs from the definition here")
        for cause in found.causes:
            click.echo(f"  {cause}")
    if found.lagging:
        lagging = ", ".join(map(str, found.lagging))
        click.echo(f"full attention has them; a load has to bring the end of groups {lagging} (equal specs together)")
    beyond = next((group.next for group in found.groups), None)
    lacks = "lacks nothing more: no longer hit is possible" if beyond is None else f"lacks for {beyond} tokens"
    rows = ((each.group, f"{each.kind}:{each.block_size}", each.largest, _missing(each)) for each in found.groups)
    console().print(table(f">group|=kind|>alone|{lacks}", rows, box=None, pad_edge=False))


def _missing(group: Resumption) -> str:
    if group.next is None:
        return ""
    if not group.lacks:
        return "nothing"
    lines = [f"tokens {lack.first} to {lack.last}: {lack.why}" for lack in group.lacks[:MOST_MISSING]]
    more = len(group.lacks) - MOST_MISSING
    return "\n".join(lines + ([f"and {more} more"] if more > 0 else []))

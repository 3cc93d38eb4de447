"""`--html` of the commands that check, compare and record: one file on which a cache's life can be read.

The page holds everything it shows and asks nobody for anything (`hkv.page`); `docs/look.md` reads one. Every case is
performed for it, the state asked for after each operation (`hkv.oracle.history`): once more, unless a check that
agreed drew it, so that a page costs time only where one is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hkv.cli.output_option import OutputPath, write_output
from hkv.cli.progress import progress_bar
from hkv.contract import registry
from hkv.contract.case import Case
from hkv.contract.log import Log
from hkv.contract.options import option
from hkv.oracle.account import command
from hkv.oracle.broken_invariant import Broken
from hkv.oracle.check import Difference
from hkv.oracle.found_difference import FoundDifference
from hkv.oracle.history import Engines, Mark, difference_mark, history, invariant_mark
from hkv.oracle.log_file import log_bytes
from hkv.oracle.side import EngineSide
from hkv.page import page


def html_field(what: str = "every block through all operations") -> Any:
    """A field for `--html`."""
    said = f"Write a page that shows {what}, one file for a browser; - for standard output."
    return option(None, "--html", metavar="FILE", type=OutputPath(), help=said)


def write_page(path: str, title: str, cases: Sequence[dict[str, Any]]) -> None:
    """Writes a page of some cases."""
    write_data(path, {"title": title, "cases": list(cases)})


def write_data(path: str, data: dict[str, Any]) -> None:
    """Writes a page of data that has a title."""
    write_output(path, page(data["title"], data))


def log_case(
    log: Log,
    engines: Engines,
    difference: Difference | None = None,
    *,
    name: str = "",
    line: int | None = None,
    recorded: str = "log",
    commands: Mapping[str, str] | None = None,
    drawn: EngineSide | None = None,
) -> dict[str, Any]:
    """A log and an engine next to it, or the log alone; `line`: where the page opens, if not at the difference;
    `drawn`: the engine's side, if a check has drawn it."""
    marks: list[Mark] = []
    if difference is not None:
        pair = (engines[0][0] if engines else "found", recorded if engines else "promised")
        marks.append(difference_mark(difference.line, difference.field, difference.want, difference.got, pair))
    elif line is not None:
        marks.append(Mark(line, "line", "the line that was asked for"))
    headline = "" if difference is None else f"{difference.operation} {difference.id or ''} differs: {difference.field}"
    with progress_bar("drawing", len(log.operations)) as advance:
        return history(
            name or log.path,
            log.header,
            log.operations,
            engines,
            recorded=recorded,
            marks=marks,
            headline=headline,
            commands=commands,
            path=log.path,
            log=log,
            drawn=drawn,
            progress=advance,
        )


def difference_case(found: FoundDifference, engines: Engines, ids: str) -> dict[str, Any]:
    """A difference of two engines, with the invariants that either breaks."""
    marks: list[Mark] = []
    dialect = registry.dialect_of(found.case.header.dialect)
    for broken, engine in ((found.broken, found.engines[0]), (found.broken_by_other, found.engines[1])):
        if isinstance(broken, Broken):
            marks.append(invariant_mark(dialect, broken, engine))
    again = {
        "finds it again": command(
            *("diff", "--engines", ",".join(found.engines), "--dialect", found.case.header.dialect),
            *("--feature", found.feature, "--first-seed", found.seed, "--seeds", 1, "--version", found.version),
        ),
        "of the case below, saved as case.jsonl": command("check", "case.jsonl", "--engine", found.engines[0]),
    }
    name = f"{found.feature} seed {found.seed} version {found.version}"
    return two_engines(name, found.case, engines, ids=ids, marks=marks, headline=found.headline, commands=again)


def two_engines(name: str, case: Case, engines: Engines, **settings: Any) -> dict[str, Any]:
    """A failing case, on both engines: the one in doubt, and the one that counts."""
    line, mismatch = len(case.answers) + 1, case.mismatch
    pair = (engines[0][0], engines[1][0])
    mark = difference_mark(line, mismatch.field, mismatch.want, mismatch.got, pair)
    marks = (mark, *settings.pop("marks", ()))
    text = log_bytes(case.header, case.differing, case.answers)
    return history(name, case.header, case.operations, engines, marks=marks, text=text, **settings)

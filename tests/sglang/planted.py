"""Defects planted in the reference under SGLang's rules, and what `hkv diff` says of each first.

`python -m tests.sglang.planted` prints every first line, and how many of them name the cause; `NAME` only that one's.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import tomllib
from collections.abc import Sequence
from typing import Any

from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.engines.numpy import SGLangNumpyEngine
from hkv.oracle.comparison import Comparison
from hkv.oracle.record import Only
from hkv.testing.planting import Patch, applied

PATH = pathlib.Path(__file__).with_name("planted.toml")

SEEDS = 60
"""Seeds of each feature among which a defect is looked for."""


@dataclasses.dataclass(frozen=True)
class Defect:
    """One of them: its edits, what goes wrong, and words of which the first line has one if it names the cause."""

    name: str
    wrong: str
    expected: tuple[str, ...]
    edits: tuple[Patch, ...]

    def engine(self) -> type[SGLangNumpyEngine]:
        """The reference with the defect, which the reference beside it does not have."""
        with applied(*self.edits):
            codes = [(edit.function(), edit.function().__code__) for edit in self.edits]

        class Defective(SGLangNumpyEngine):
            def perform(self, operation: structs.Operation) -> Any:
                right = [(function, function.__code__) for function, _ in codes]
                for function, code in codes:
                    function.__code__ = code
                try:
                    return super().perform(operation)
                finally:
                    for function, code in right:
                        function.__code__ = code

        return Defective


def defects() -> dict[str, Defect]:
    """All of them, by name."""
    rows = tomllib.loads(PATH.read_text("utf-8"))
    return {
        name: Defect(
            name,
            row["wrong"],
            tuple(row["expected"].split("|")),
            tuple(Patch(_whole(target), old, new) for target, old, new in row["edits"]),
        )
        for name, row in rows.items()
    }


def _whole(target: str) -> str:
    """A target's whole name, where it stands in a chapter of the text."""
    return target if "." in target.partition(":")[0] else f"reference.dialects.sglang.{target}"


def first_line(defect: Defect) -> str:
    """First line of the report of `hkv diff` on a defect; "" if it is not found."""
    comparison = Comparison((defect.engine(), "numpy"), Only(dialect=structs.NAME))
    for feature in comparison.features:
        if any(comparison.seed(feature, seed) for seed in range(SEEDS)):
            return next(comparison.differences(shrink=True)).headline
    return ""


def names(defect: Defect, line: str) -> bool:
    """True if a first line names the cause of a defect."""
    return any(words in line for words in defect.expected)


HEAD = """# Defects planted in SGLang's rules

Each row is a defect planted by itself, in memory, in `reference/dialects/sglang`, and the first line of what `hkv diff`
says of it and the reference, made small. `python -m tests.sglang.planted --markdown docs/tables/planted-in-sglang.md`
writes this page; the edits, and the words by which a first line names the cause, are in `tests/sglang/planted.toml`.
Lines that name an effect alone are in italics. Of the same kinds are those in an installed SGLang,
[mutants-in-sglang.md](mutants-in-sglang.md)."""


def page(chosen: Sequence[str] = ()) -> str:
    """The page of first lines, of those that are chosen or of all."""
    rows = [each for each in defects().values() if not chosen or each.name in chosen]
    lines = {each.name: first_line(each) for each in rows}
    found = [each for each in rows if lines[each.name]]
    named = [each for each in found if names(each, lines[each.name])]
    counts = f"{len(found)} of {len(rows)} found, {len(named)} first lines name the cause."
    table = ["| defect | wrong | first line |", "|---|---|---|"]
    for each in rows:
        said = lines[each.name].replace("|", "\\|") or "**not found**"
        table.append(f"| `{each.name}` | {each.wrong} | {said if each in named else f'*{said}*'} |")
    return "\n".join([HEAD, "", counts, "", *table, ""])


def main(arguments: Sequence[str]) -> None:
    """Prints the page of all defects, or of those that are named; or writes it, after `--markdown`, to a file."""
    if arguments[:1] == ["--markdown"]:
        pathlib.Path(arguments[1]).write_text(page(), "utf-8")
    else:
        print(page(arguments))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Defects planted in the reference under SGLang's rules, and what `hkv diff` says of each first.

`python -m tests.sglang.planted` prints every first line, and how many of them name the cause.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import tomllib
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
            tuple(Patch(f"reference.dialects.sglang.{target}", old, new) for target, old, new in row["edits"]),
        )
        for name, row in rows.items()
    }


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


def main(chosen: list[str]) -> None:
    """Prints the first line of each, of those that are chosen or of all."""
    rows = [each for each in defects().values() if not chosen or each.name in chosen]
    lines = {each.name: first_line(each) for each in rows}
    for each in rows:
        print(f"{'+' if names(each, lines[each.name]) else '-'} {each.name}: {lines[each.name] or 'not found'}")
    found = [each for each in rows if lines[each.name]]
    named = sum(names(each, lines[each.name]) for each in found)
    print(f"{len(found)} of {len(rows)} found, {named} first lines name the cause")


if __name__ == "__main__":
    main(sys.argv[1:])

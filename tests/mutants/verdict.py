"""Verdict on a planted defect."""

from __future__ import annotations

import dataclasses
from typing import Literal

from tests.mutants.row import Planted

Outcome = Literal["killed", "lives", "broken", "no answer", "misread"]
"""`broken`: a test failed over something else than what it checks, which shows nothing; `no answer`: it was ended;
`misread`: the engines differ, and the report is long or does not name the cause."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Verdict on a planted defect: the invariant, or the test, that caught it, and why.

    `seconds` are to the kill, of a test processor time; `examples` of a suite up to the one that showed it; `size` and
    `lines` are of the shrunk case.
    """

    mutant: Planted
    outcome: Outcome
    invariant: str | None
    problem: str
    seconds: float
    examples: int = 1
    size: int = 1
    lines: tuple[str, ...] = ()

    @property
    def killed(self) -> bool:
        """True if it was caught."""
        return self.outcome == "killed"

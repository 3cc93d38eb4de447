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
    """Verdict on a planted defect.

    Attributes:
      mutant: the defect.
      outcome: see `Outcome`.
      invariant: the invariant, or the test, that caught it; None if none did.
      problem: the failure's message.
      seconds: to the kill, shrinking not counted; of a test, of processor time.
      examples: of a suite, examples up to and with the one that showed it.
      size: operations of the shrunk case.
      lines: the shrunk case.
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

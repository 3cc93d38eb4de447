"""Results of `hkv diff`, as typed values: a difference on a small case, and all that a comparison found."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from hkv.columns import Columns, columns
from hkv.contract import registry
from hkv.contract.case import Case
from hkv.contract.log import describe
from hkv.oracle.broken_invariant import Broken
from hkv.oracle.check import with_bugs
from hkv.oracle.log_file import write_log
from hkv.oracle.verbs import Path

_LONG = re.compile(r"\[((?:\d+, ){6})(?:\d+, )+(\d+)\]")
"""A list of more than eight numbers; the first six and the last are shown."""


@dataclasses.dataclass(frozen=True)
class FoundDifference:
    """Traffic on which two engines differ.

    Attributes:
      feature: feature of the traffic.
      seed: of the configuration and the traffic.
      version: of the log format.
      case: the operations up to the one that is answered differently, or on to the broken invariant, made small if
        that was wanted.
      operations_before_shrinking: number of operations before.
      engines: names of the engine in doubt and of the one that counts.
      broken: the first invariant that the engine in doubt breaks on the case, or why none is known, in words.
      broken_by_other: the same of the engine that counts.
      shrinking_problem: the error that ended shrinking too early, or None.
      known: known defects that the engine that counts reproduces here, as the other one has them.
      defined: whether the engine that counts was declared the definition.
    """

    feature: str
    seed: int
    version: int
    case: Case
    operations_before_shrinking: int
    engines: tuple[str, str]
    broken: Broken | str
    broken_by_other: Broken | str
    shrinking_problem: str | None
    known: tuple[str, ...] = ()
    defined: bool = False

    @property
    def line(self) -> int:
        """Line of the log that `write` writes, 1 for the configuration itself."""
        return len(self.case.answers) + 1

    @property
    def operation(self) -> str:
        """The operation that is answered differently, on one line."""
        return describe(self.case.differing[-1]) if self.case.operations else "header"

    @property
    def headline(self) -> str:
        """First line of a report: the broken invariant, how, and by whom if not by the engine in doubt; or what is
        wrong with the answer. A definition is never to blame: an invariant that it breaks is itself in doubt."""
        if isinstance(self.broken, Broken):
            return _problem(self.broken)
        if isinstance(self.broken_by_other, Broken) and not self.defined:
            return f"{self.engines[1]} itself breaks {_problem(self.broken_by_other)}"
        said = registry.dialect_of(self.case.header.dialect).difference(self.case) if self.case.operations else ""
        mismatch = self.case.mismatch
        wrong = mismatch.got if self.case.fails else f"{mismatch.field} is {mismatch.got}, not {mismatch.want}"
        return said or f"{self.operation}: {wrong}"

    @property
    def invariant(self) -> str | None:
        """Name of the broken invariant, or None."""
        return self.broken.name if isinstance(self.broken, Broken) else None

    def write(self, path: Path) -> None:
        """Writes the case as a log, with the answers of the engine that counts, whole or not at all."""
        write_log(path, with_bugs(self.case.header, self.known), self.case.differing, self.case.answers)

    def record(self) -> dict[str, Any]:
        """Record in plain values, for `hkv diff --json`."""
        return {
            "seed": self.seed,
            "version": self.version,
            "line": self.line,
            "headline": self.headline,
            "operation": self.operation,
            "field": self.case.mismatch.field,
            "want": self.case.mismatch.want,
            "got": self.case.mismatch.got,
            "operations": len(self.case.operations),
            "operations_before_shrinking": self.operations_before_shrinking,
            "invariant": self.invariant,
            "invariant_problem": self.broken.problem if isinstance(self.broken, Broken) else self.broken,
            "in_doubt": self.engines[0],
            "known": list(self.known),
            "invariant_of_other": self.broken_by_other.name if isinstance(self.broken_by_other, Broken) else None,
            **({} if self.shrinking_problem is None else {"shrinking_problem": self.shrinking_problem}),
        }


def _problem(broken: Broken) -> str:
    """A broken invariant on one line, long lists of blocks shortened."""
    return f"{broken.name}: " + _LONG.sub(r"[\1..., \2]", " ".join(broken.problem.split()))


@dataclasses.dataclass(frozen=True)
class DiffResult:
    """Result of comparing two engines.

    Attributes:
      engines: names of the engine in doubt and of the one that counts.
      found: the first difference of each feature that has one.
      seeds: seeds that both engines implement.
      not_implemented: seeds that one of them says it does not implement.
      reason: reason given, the first time; "" where they all are.
      operations: operations performed.
      failed: seeds that ended with an error of both engines; what comes after it was not compared.
      failure: error of the engine that counts, the first time; "" where there was none.
      not_compared: what one of the engines says it lacks, with its meaning.
      known: number of seeds, by the known defect, that differ in nothing else.
      hint: options under which both engines implement what is drawn, in words, where they implement little; else "".
    """

    engines: tuple[str, str]
    found: tuple[FoundDifference, ...]
    seeds: int
    not_implemented: int
    reason: str
    operations: int
    failed: int = 0
    failure: str = ""
    hint: str = ""
    not_compared: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    known: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])

    @property
    def agrees(self) -> bool:
        """True if no difference was found that is not known."""
        return not self.found

    @property
    def differences(self) -> Columns:
        """One entry a difference: `feature`, `seed`, `version`, `line`, `operation`, `field`, `invariant`."""
        return columns(
            self.found,
            {
                "feature": (lambda found: found.feature, str),
                "seed": (lambda found: found.seed, int),
                "version": (lambda found: found.version, int),
                "line": (lambda found: found.line, int),
                "operation": (lambda found: found.operation, str),
                "field": (lambda found: found.case.mismatch.field, str),
                "invariant": (lambda found: found.invariant or "", str),
            },
        )

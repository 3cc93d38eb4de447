"""One planted defect: what is edited, and what must notice it."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any, Literal

from hkv.testing.planting import Patch

DIFF = "diff"
"""Judge of defects that are planted in an installed package: `hkv diff`, with its default settings."""


@dataclasses.dataclass(frozen=True)
class Planted:
    """A defect: a bug that shipped in an engine, or nearly did, or a one-line edit of our own.

    Attributes:
      name: in a few words joined by hyphens; unique.
      section: the file of `tests/mutants/rows` that it is in.
      edits: the edits.
      judge: name of a suite of `tests.suites`, `module:function` of a test or of a property that tests
        use, or `DIFF`.
      arguments: what the judge is called with; of a suite, the topics of its cases, all of them if empty; of `DIFF`,
        the version of the log, the default ones if empty.
      expected: names of the invariants that may notice it first; under `DIFF`, words of the report's first line, one of
        which names the cause.
      upstream: where the bug was published: `vllm#33775`, or a commit, `rtp-llm@04e47d7b1`.
      wrong: what goes wrong, in one line.
      reader: under `DIFF`, where the first line leads a reader: to the `cause`, an `effect`, or `astray`; "" without a
        grade.
    """

    name: str
    section: str
    edits: tuple[Patch, ...]
    judge: str
    arguments: tuple[Any, ...] = ()
    expected: tuple[str, ...] = ()
    upstream: tuple[str, ...] = ()
    wrong: str = ""
    reader: str = ""

    @property
    def judged_by_suite(self) -> bool:
        """True if a suite judges it, and no test."""
        return not self.judged_by_test and self.judge != DIFF

    @property
    def judged_by_test(self) -> bool:
        """True if a test judges it, or a property that tests use."""
        return ":" in self.judge

    @property
    def judge_name(self) -> str:
        """The judge and its arguments, in a few words."""
        module, _, name = self.judge.rpartition(":")
        said = f"{module.removeprefix('tests.').replace('.', '/')}: {name.removeprefix('test_')}" if module else name
        return said + (f" [{', '.join(map(str, self.arguments))}]" if self.arguments else "")

    def property(self) -> Callable[[], object]:
        """Test that must fail while the defect is planted, and passes without it; for mutants that a test judges."""
        module, name = self.judge.split(":")
        return functools.partial(getattr(importlib.import_module(module), name), *self.arguments)


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

"""Kernels that never come back: a run of checks in a process of its own, watched from outside.

The process says which case it begins and when that is over, and in the end what it found. Whoever started it ends it
where a case takes too long. One process for a run, not for a case.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from hkv.errors import ConfigError, HKVError
from hkv.processes import Child, ProcessDied
from hkv.testing.kernels.call import Call
from hkv.testing.kernels.cases import Case, Supports
from hkv.testing.kernels.judge import Failure, Finding, Verdict, case_bytes, read_case, telling_of
from hkv.testing.kernels.targets import Target

Outcome = tuple[Target, Verdict]
Run = Callable[..., Outcome]
"""Called with what is to be told of each case, functions to call after each and with each failure, and the arguments of
`watched`."""

FAREWELL = 5.0
"""Seconds that a process has to end by itself once it gave its result."""


def watched(
    name: str, seconds: float, run: Run, *arguments: Any, advance: Callable[[], None] = lambda: None
) -> Outcome:
    """Outcome or error of `run` in a process of its own, or the failure that it cannot tell itself.

    Args:
      name: of the kernel.
      seconds: time that one case may take.
      run: a function of a module.
      arguments: those of `run` after the first three; whatever can be pickled.
      advance: called after each case that was asked.

    Raises:
      ConfigError: the process ended where no case was performed.
      Exception: whatever `run` raised.
    """
    performed, asked, earlier = b"", 0, list[Failure]()
    with Child(_child, run, arguments) as child:
        try:
            while True:
                kind, content = child.heard(seconds if performed else None)
                match kind:
                    case "performs":
                        performed = content
                    case "failed":
                        earlier.append(content)
                    case "asked":
                        asked += 1
                        advance()
                    case "found":
                        child.process.join(FAREWELL)
                        supports, verdict = content
                        return Target(name, supports, ()), verdict
        except ProcessDied as error:
            if not performed:
                raise ConfigError("TARGET", name, f"a kernel that can be loaded: its process {error}") from None
            return _failure(performed, asked, error, earlier)


def _child(pipe: Any, run: Run, arguments: tuple[Any, ...]) -> None:
    def performing(target: Target, case: Case | None) -> None:
        pipe.send(("performs", b"" if case is None else case_bytes(target, case)))

    try:
        asked, failing = (lambda: pipe.send(("asked", None))), (lambda failure: pipe.send(("failed", failure)))
        target, verdict = run(performing, asked, failing, *arguments)
        pipe.send(("found", (target.supports, verdict)))
    except Exception as error:
        if not isinstance(error, HKVError):
            error.add_note(f"in the process of the kernel: {traceback.format_exc()}")
        pipe.send(error)


def _failure(performed: bytes, asked: int, error: ProcessDied, earlier: list[Failure]) -> Outcome:
    """The first failure before the case that is being performed, which says more, or of that case."""
    kept = read_case(performed, "the case that was performed")
    none = np.zeros(0, np.int64), np.zeros(0, np.uint8)
    finding = Finding(Call(kept.case), none, none, f"{type(error).__name__}: {error}")
    text = f"{telling_of(finding)}\nit was case {asked + 1}, and ended the run"
    failure = Failure(finding.kinds[0], text, kept.case, 1, asked + 1)
    if earlier:
        told = f"{len(earlier)} of {asked} cases failed\nthen, at {kept.case}, {finding.kinds[0]}"
        failure = dataclasses.replace(earlier[0], text=f"{earlier[0].text}\n{told}", failed=len(earlier))
    verdict = Verdict(kept.target, kept.case.operation, asked + 1, {}, {}, failure)
    return Target(kept.target, Supports(**kept.supports), ()), verdict

"""Judging a planted defect by a test, in a process of its own: nothing compiled with it stays, hangs are ended."""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest
from hypothesis import HealthCheck, Phase, settings

from hkv.errors import HKVError
from hkv.machine import native_loops
from hkv.testing.planting import applied
from tests import quick_compilation
from tests.mutants.row import Outcome, Planted, Verdict

PATIENCE = 400
"""Seconds of processor time after which a judge that has not answered is ended, however busy the machine is."""

ASLEEP = 3600
"""Seconds by the clock after which one is ended that waits for nothing, as kernels with too few barriers do."""


def prepare() -> None:
    """Sets up what judges need before they are imported: fixed examples, no shrinking, quick compilation.

    Hypothesis's default profile is what tests without settings of their own, or with some, are built on.
    """
    settings.register_profile(
        "mutants",
        phases=(Phase.explicit, Phase.generate),
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("mutants")
    native_loops.enable()
    quick_compilation.enable()  # a defect's program runs for less time than it takes to compile


def judge(planted: Planted, patience: int = PATIENCE) -> Verdict:
    """Plants a defect in a child process and runs its judge there.

    The child is forked: this process has to have imported what judges need, and must not have used JAX.
    """
    before = _used()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(planted, theirs, patience), daemon=True)
    child.start()
    theirs.close()
    try:
        outcome, said = ours.recv() if ours.poll(ASLEEP) else ("no answer", f"nothing in {ASLEEP} s")
    except EOFError:
        outcome, said = "no answer", "its process was ended"
    child.kill()
    child.join()
    ours.close()
    return Verdict(planted, outcome, planted.judge_name if outcome == "killed" else None, said, _used() - before)


def _used() -> float:
    """Seconds of processor time of the children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _run(planted: Planted, answer: Connection, patience: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (patience, patience))
    with applied(*planted.edits):
        answer.send(_outcome(planted.property()))
    answer.close()


def _outcome(check: Callable[[], object]) -> tuple[Outcome, str]:
    """A property fails by an assertion, over an error that did not come, or as one of two forms refused."""
    try:
        check()
    except (AssertionError, HKVError, pytest.fail.Exception) as error:
        return "killed", _first_line(error)
    except Exception as error:
        return "broken", f"{type(error).__name__}: {_first_line(error)}"
    return "lives", ""


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__

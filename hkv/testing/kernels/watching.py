"""Kernels that never come back: a run of checks in a process of its own, watched from outside.

A process cannot stop a loop in its own native code, nor tell its own segmentation fault. So a run has a process, which
says on a pipe which case it begins and when that is over, and in the end what it found. Whoever started it ends it
where a case takes too long. One process for a run, not for a case.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import traceback
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

import numpy as np

from hkv.errors import ConfigError, HKVError
from hkv.foreign import child_context, end_with_parent, ended
from hkv.testing.kernels.call import Call
from hkv.testing.kernels.cases import Case, Supports
from hkv.testing.kernels.judge import Failure, Finding, Verdict, case_bytes, read_case, telling_of
from hkv.testing.kernels.native import KernelDied, ready_of
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
    context = child_context()
    reader, writer = context.Pipe(duplex=False)
    process: Any = context.Process(target=_child, args=(writer, run, arguments))  # type: ignore[attr-defined]
    process.start()
    writer.close()
    performed, asked, earlier = b"", 0, list[Failure]()
    try:
        while True:
            kind, content = _heard(reader, process, seconds if performed else None)
            match kind:
                case "performs":
                    performed = content
                case "failed":
                    earlier.append(content)
                case "asked":
                    asked += 1
                    advance()
                case "raised":
                    raise content
                case "found":
                    process.join(FAREWELL)
                    supports, verdict = content
                    return Target(name, supports, ()), verdict
    except KernelDied as error:
        if not performed:
            raise ConfigError("TARGET", name, f"a kernel that can be loaded: its process {error}") from None
        return _failure(performed, asked, error, earlier)
    finally:
        process.kill()
        process.join()
        reader.close()


def _heard(reader: Any, process: Any, seconds: float | None) -> tuple[str, Any]:
    """The next that the process says; KernelDied where it ended, or as `ready_of`."""
    waited = [reader, process.sentinel]
    ready = connection.wait(waited) if seconds is None else ready_of(waited, process.pid, seconds)
    with contextlib.suppress(EOFError, OSError):  # it may have ended within a message
        if reader in ready or reader.poll():
            return reader.recv()
    process.join()
    raise KernelDied(ended(process.exitcode))


def _child(writer: Any, run: Run, arguments: tuple[Any, ...]) -> None:
    end_with_parent()
    signal.set_wakeup_fd(-1)  # a fork has its parent's, who hears of an interrupt itself
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    def performing(target: Target, case: Case | None) -> None:
        writer.send(("performs", b"" if case is None else case_bytes(target, case)))

    try:
        asked, failing = (lambda: writer.send(("asked", None))), (lambda failure: writer.send(("failed", failure)))
        target, verdict = run(performing, asked, failing, *arguments)
        writer.send(("found", (target.supports, verdict)))
    except Exception as error:
        if not isinstance(error, HKVError):
            error.add_note(f"in the process of the kernel: {traceback.format_exc()}")
        with contextlib.suppress(BrokenPipeError):
            writer.send(("raised", error))


def _failure(performed: bytes, asked: int, error: KernelDied, earlier: list[Failure]) -> Outcome:
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

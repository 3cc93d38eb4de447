"""Kernels that never come back: a run of checks in a process of its own, watched from outside.

A process cannot stop a loop in its own native code, nor tell its own segmentation fault. So a command forks once,
before anything of the kernel is loaded: the child goes on with the run and leaves in memory that both have which case
is being performed; the parent waits, and ends it where a case takes too long. One process for a run, not for a case.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import signal
import struct
import sys
import time

import numpy as np

from hkv.testing.kernels.call import Call
from hkv.testing.kernels.cases import Case, Supports
from hkv.testing.kernels.judge import Failure, Finding, Verdict, case_bytes, read_case, telling_of
from hkv.testing.kernels.native import KernelDied, KernelHung, ended
from hkv.testing.kernels.targets import Target

HEADER = struct.Struct("qqd")
"""Cases begun, bytes of the one that is being performed or 0, and when it began."""

SIZE = 1 << 20
"""Bytes of the memory: a case has at most 4096 ids of each kind."""


PARENT_DEATH = 1
"""Linux's `PR_SET_PDEATHSIG`: a child that hangs must not outlive whoever would end it."""


class Watched:
    """A child of this process in which kernels run; the constructor returns in both.

    Args:
      seconds: time that one case may take.

    Attributes:
      is_child: true in the child, which goes on.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._memory = mmap.mmap(-1, SIZE)
        self._alive, held = os.pipe()
        self._begun = 0
        sys.stdout.flush()
        sys.stderr.flush()
        self._child = os.fork()
        self.is_child = self._child == 0
        os.close(self._alive if self.is_child else held)  # the parent sees the end of the pipe when the child ends
        if self.is_child:
            ctypes.CDLL(None).prctl(PARENT_DEATH, signal.SIGKILL)
        else:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the child reports what it found so far, and ends

    def performing(self, target: Target, case: Case | None) -> None:
        """Says in the child which case begins; None after it."""
        text = b"" if case is None else case_bytes(target, case)
        self._begun += case is not None
        self._memory[HEADER.size : HEADER.size + len(text)] = text
        self._memory[: HEADER.size] = HEADER.pack(self._begun, len(text), time.monotonic())

    def wait(self) -> int | tuple[Target, Verdict]:
        """Exit status of the child, or the kernel and the failure that the child cannot tell itself."""
        while not select.select([self._alive], [], [], self._left())[0]:
            if self._left() <= 0:
                os.kill(self._child, signal.SIGKILL)
                os.waitpid(self._child, 0)
                return self._failure(KernelHung(self._seconds))
        status = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
        if status < 0 and self._header()[1]:
            return self._failure(KernelDied(ended(status)))
        return status if status >= 0 else 128 - status

    def _header(self) -> tuple[int, int, float]:
        return HEADER.unpack(self._memory[: HEADER.size])

    def _left(self) -> float:
        """Seconds that the case which is being performed still has; all of them between two cases."""
        _, length, began = self._header()
        return max(0.0, began + self._seconds - time.monotonic()) if length else self._seconds

    def _failure(self, error: KernelDied) -> tuple[Target, Verdict]:
        """The failure of the case that is being performed."""
        asked, length, _ = self._header()
        kept = read_case(self._memory[HEADER.size : HEADER.size + length], "the case that was performed")
        none = np.zeros(0, np.int64), np.zeros(0, np.uint8)
        finding = Finding(Call(kept.case), none, none, f"{type(error).__name__}: {error}")
        text = f"{telling_of(finding)}\n1 of {asked} cases failed"
        failure = Failure(finding.kinds[0], text, kept.case, 1, asked)
        target = Target(kept.target, Supports(**kept.supports), ())
        return target, Verdict(kept.target, kept.case.operation, asked, {}, {}, failure)
